from __future__ import annotations

import os

import pytest
import torch

from st_reba import LayerStates, LayerwiseAutoencoder
from st_reba.train.states import ModelOnStates, StatesCache

from ..backbones import TEXTS


@pytest.fixture(scope="module")
def module(backbone_path):
    return LayerStates(backbone_path()).eval()


def expected(module, texts):
    with torch.inference_mode():
        return torch.cat([module(module.preprocess([text]))["layer_states"] for text in texts])


def test_states_are_the_models(module, tmp_path):
    counts = []
    cache = StatesCache(tmp_path, module, chunk_size=2, batch_size=2, on_texts=counts.append)
    cache.add([*TEXTS, TEXTS[0]])
    cache.add(TEXTS)
    assert sum(counts) == len(TEXTS) == len(cache)
    chosen = [TEXTS[3], TEXTS[0], TEXTS[3]]
    found = cache.states(chosen)
    assert found.dtype == torch.float32
    wanted = expected(module, chosen)
    assert bool(((found - wanted).abs() <= 2**-11 * wanted.abs().amax(dim=-1, keepdim=True)).all())


def test_it_is_there_for_the_next_run_and_grows(module, tmp_path, monkeypatch):
    states = StatesCache(tmp_path, module).states(TEXTS[:2])
    again = StatesCache(tmp_path, module)
    again.add(TEXTS[:2])
    again.add(TEXTS)
    monkeypatch.setattr(module, "forward", None)
    whole = StatesCache(tmp_path, module)
    whole.add(TEXTS[:2])
    whole.add(TEXTS)
    assert torch.equal(whole.states(TEXTS[:2]), states)


def test_models_and_settings_are_kept_apart(module, backbone_path, tmp_path):
    made = [
        module,
        LayerStates(backbone_path("qwen3")),
        LayerStates(backbone_path(), template="so: {text}"),
        LayerStates(backbone_path(), pool_over="all"),
        LayerStates(backbone_path(), bidirectional_layers=1),
    ]
    for count, one in enumerate([*made, LayerStates(backbone_path())], start=1):
        StatesCache(tmp_path, one).add(TEXTS)
        assert len(list(tmp_path.iterdir())) == min(count, len(made))


def test_a_run_that_was_killed_loses_what_it_had_not_written(module, tmp_path, monkeypatch):
    cache = StatesCache(tmp_path, module, chunk_size=2)
    replace, written = os.replace, []

    def killed(source, target):
        written.append(target)
        if len(written) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            cache.add(TEXTS)
    (path,) = tmp_path.iterdir()
    before = path.stat().st_mtime_ns
    path.with_name(".writing-left-behind").write_bytes(b"half")
    states = StatesCache(tmp_path, module, chunk_size=2).states(TEXTS)
    assert torch.allclose(states, expected(module, TEXTS), rtol=1e-2, atol=1e-2)
    assert path.stat().st_mtime_ns == before
    assert len(list(tmp_path.iterdir())) == 3
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-10])
    assert torch.equal(StatesCache(tmp_path, module, chunk_size=2).states(TEXTS), states)


def test_states_beyond_the_range_of_float16(module, tmp_path, monkeypatch):
    scale = torch.tensor([1e9, 1e-9, 0.0])[:, None]
    forward = module.forward
    monkeypatch.setattr(module, "forward", lambda features: {"layer_states": forward(features)["layer_states"] * scale})
    cache = StatesCache(tmp_path, module)
    cache.add(TEXTS)
    found, wanted = cache.states(TEXTS), expected(module, TEXTS)
    assert bool(((found - wanted).abs() <= 2**-11 * wanted.abs().amax(dim=-1, keepdim=True)).all())
    assert wanted.abs().max() > 65504
    scale.fill_(torch.inf)
    with pytest.raises(ValueError, match="are not finite: the model overflows in torch.float32"):
        cache.add(["another text"])


def test_a_model_that_looks_states_up(module, tmp_path):
    cache = StatesCache(tmp_path, module)
    cache.add(TEXTS)
    autoencoder = LayerwiseAutoencoder(3, 32)
    model = ModelOnStates.of(autoencoder, cache)
    found = model.encode(TEXTS, batch_size=2, convert_to_tensor=True)
    assert torch.allclose(found.cpu(), autoencoder.embed(cache.states(TEXTS).to(model.device)).cpu(), atol=1e-6)
    with pytest.raises(ValueError, match="prompt='query: ': cached states have none"):
        model.encode(TEXTS, prompt="query: ")
