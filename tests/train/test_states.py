from __future__ import annotations

import pytest
import torch

from st_reba import LayerStates, LayerwiseAutoencoder
from st_reba.train.freeze import ModelOnStates, StatesCache

from ..backbones import TEXTS


@pytest.fixture(scope="module")
def module(backbone_path):
    return LayerStates(backbone_path()).eval()


def check(found, module, texts) -> None:
    with torch.inference_mode():
        wanted = torch.cat([module(module.preprocess([text]))["layer_states"] for text in texts])
    assert found.dtype == torch.float32
    assert bool(((found - wanted).abs() <= 2**-11 * wanted.abs().amax(dim=-1, keepdim=True)).all())


def test_states_are_the_models_and_each_text_is_read_once(module, tmp_path):
    counts = []
    cache = StatesCache(tmp_path, module, chunk_size=2, batch_size=2, on_texts=counts.append)
    cache.add([*TEXTS, TEXTS[0]])
    cache.add(TEXTS)
    assert sum(counts) == len(TEXTS)
    check(cache.states([TEXTS[3], TEXTS[0], TEXTS[3]]), module, [TEXTS[3], TEXTS[0], TEXTS[3]])


def test_models_and_settings_are_kept_apart(module, backbone_path, tmp_path):
    given: list[dict] = [{"template": "so: {text}"}, {"pool_over": "all"}, {"bidirectional_layers": 1}]
    made = [module, LayerStates(backbone_path("qwen3")), *(LayerStates(backbone_path(), **each) for each in given)]
    for count, one in enumerate([*made, LayerStates(backbone_path())], start=1):
        StatesCache(tmp_path, one).add(TEXTS)
        assert len(list(tmp_path.iterdir())) == min(count, len(made))


def test_states_beyond_the_range_of_float16(module, tmp_path, monkeypatch):
    scale, forward = torch.tensor([1e9, 1e-9, 0.0])[:, None], module.forward
    monkeypatch.setattr(module, "forward", lambda features: {"layer_states": forward(features)["layer_states"] * scale})
    cache = StatesCache(tmp_path, module)
    check(cache.states(TEXTS), module, TEXTS)
    scale.fill_(torch.inf)
    with pytest.raises(ValueError, match="are not finite: the model overflows in torch.float32"):
        cache.add(["another text"])


def test_a_model_that_looks_states_up(module, tmp_path):
    cache, autoencoder = StatesCache(tmp_path, module), LayerwiseAutoencoder(3, 32)
    model = ModelOnStates.of(autoencoder, cache)
    found = model.encode(TEXTS, batch_size=2, convert_to_tensor=True)
    assert torch.allclose(found.cpu(), autoencoder.embed(cache.states(TEXTS).to(model.device)).cpu(), atol=1e-6)
    with pytest.raises(ValueError, match="prompt='query: ': cached states have none"):
        model.encode(TEXTS, prompt="query: ")
