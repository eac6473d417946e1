from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from st_reba import LayerStates, LayerwiseAutoencoder
from st_reba.train.fitting import weights_digest
from st_reba.train.freeze import FreezeTraining, ModelOnStates, StatesCache, train_freeze

from ..backbones import TEXTS
from ..conftest import long
from . import check_card, stop

LONGER = {"num_train_epochs": 5, "learning_rate": 5e-2, "save_steps": 20}
PAIRS = [(first, second, 5 - abs(i - j)) for i, first in enumerate(TEXTS) for j, second in enumerate(TEXTS)]


@pytest.fixture
def files(tmp_path):
    rows = "".join(f"{first}\t{second}\t{score}\n" for first, second, score in PAIRS)
    (tmp_path / "pairs.tsv").write_text(rows, encoding="utf-8")
    (tmp_path / "sentences.txt").write_text("A bird sings.\nWe came home late.\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def settings(backbone_path, files):
    def make(**changes):
        given = {
            "model": backbone_path(), "pairs": str(files / "pairs.tsv"), "pretraining_epochs": 2,
            "pretraining_batch_size": 4, "head_dimension": 4, "cache": str(files / "cache"),
        }  # fmt: skip
        arguments = {"num_train_epochs": 2, "per_device_train_batch_size": 8, **changes.pop("arguments", {})}
        return FreezeTraining(**{**given, **changes}, arguments=arguments)

    return make


@pytest.mark.parametrize("stage", ["cosines", "siamese", "autoencoder", "whitened"])
def test_each_stage_trains_saves_and_loads(stage, settings, files):
    further = {"sentences": str(files / "sentences.txt")} if stage in ("autoencoder", "whitened") else {}
    given = settings(stage=stage, evaluation=str(files / "pairs.tsv"), arguments=LONGER, **further)
    model = train_freeze(given, files / "out", progress=False)
    assert weights_digest(model[0]) == weights_digest(LayerStates(given.model)), "it is read, never trained"
    assert (model[1].encoders, model[1].decoders) == (stage != "cosines", False)

    loaded = SentenceTransformer(str(files / "out" / "model"), device="cpu")
    first, second, labels = zip(*PAIRS, strict=True)
    scores = model[-1].score_pairs(model.encode(first), model.encode(second))
    assert torch.equal(loaded[-1].score_pairs(loaded.encode(first), loaded.encode(second)), scores)
    assert np.corrcoef(scores, labels)[0, 1] > (0.6 if stage == "cosines" else 0.9)
    loss = {"autoencoder": "LogResidualVarianceLoss", "whitened": "EmbeddingCoSENTLoss"}.get(stage, "PairScoreMSELoss")
    check_card(files / "out" / "model", "**Layer states**", loss)


def test_whitened_encoders_begin_as_a_whitening(settings, files):
    given = settings(stage="whitened", arguments={"max_steps": 1, "learning_rate": 1e-12})
    states, trained = train_freeze(given, files / "out", progress=False).cpu()
    read = states(states.preprocess(TEXTS))["layer_states"]
    begun = LayerwiseAutoencoder(states.depth, states.get_embedding_dimension(), head_dimension=4)
    assert not torch.allclose(trained.embed(read), begun.embed(read), atol=0.1)
    begun.whiten(read)
    assert torch.allclose(trained.embed(read), begun.embed(read), atol=0.01)


def test_cosent_trains_the_plain_cosine_of_some_layers(settings, files):
    given = settings(stage="siamese", loss="cosent", layers=(1, 3), bottlenecks=(8,), arguments=LONGER)
    model = train_freeze(given, files / "out", progress=False)
    first, second, labels = zip(*PAIRS, strict=True)
    embeddings = model.encode(first)
    assert embeddings.shape == (25, 16)
    assert np.corrcoef((embeddings * model.encode(second)).sum(axis=1), labels)[0, 1] > 0.9


def test_epochs_cost_no_forward_passes(settings, files, monkeypatch):
    """Nor does another run; and ``max_steps`` ends the pretraining, too."""
    texts, forward = [], LayerStates.forward

    def counted(self, features, **kwargs):
        texts.append(len(features["input_ids"]))
        return forward(self, features, **kwargs)

    monkeypatch.setattr(LayerStates, "forward", counted)
    given = {"evaluation": str(files / "pairs.tsv"), "sentences": str(files / "sentences.txt")}
    for out, arguments in (("first", {}), ("second", {"max_steps": 1})):
        train_freeze(settings(**given, arguments=arguments), files / out, progress=False)
        # And three sentences of sentence-transformers' own, for its card.
        assert sum(texts) == len(TEXTS) + 2 + 3
    for run in ("pretraining/checkpoints", "checkpoints"):
        (state,) = (files / "second" / run).glob("checkpoint-*/trainer_state.json")
        assert json.loads(state.read_text())["global_step"] == 1
        (weights,) = state.parent.rglob("model.safetensors")
        assert weights.stat().st_size < 90_000, "it holds what is trained alone"


@pytest.mark.parametrize("run", ["out/checkpoints", long("pretraining")])
def test_a_resumed_run_is_the_run(run, settings, files):
    """Where the data lie meanwhile, and how often is evaluated, is another matter."""
    given = {"sentences": str(files / "sentences.txt"), "arguments": {"save_steps": 2}}
    whole = train_freeze(settings(**given), files / "whole", progress=False)
    stop(train_freeze, settings(**given), files / "out", 3, run)
    assert not (files / "out" / "model").exists()
    moved = {name: str((files / name).rename(files / f"moved-{name}")) for name in ("pairs.tsv", "sentences.txt")}
    changed = settings(
        pairs=moved["pairs.tsv"], sentences=moved["sentences.txt"], evaluation=moved["pairs.tsv"],
        cache=str(files / "other-cache"), arguments={"save_steps": 3, "eval_steps": 5},
    )  # fmt: skip
    resumed = train_freeze(changed, files / "out", progress=False)
    found = resumed[1].state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in whole[1].state_dict().items())


SETTINGS = [
    ({"lowest_score": 5.0}, "lowest_score: 5 was given, but it must be below highest_score, 5"),
    ({"stage": "cosines", "bottlenecks": (4,)}, 'bottlenecks: not for stage "cosines". Leave it out'),
    ({"stage": "cosines", "loss": "cosent"}, 'loss "cosent": not for stage "cosines"'),
    ({"arguments": {"per_device_train_batch_size": 1}}, "per_device_train_batch_size: 1 was given: give 2 or more"),
]


@pytest.mark.parametrize(("changes", "message"), SETTINGS)
def test_settings(changes, message, settings):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_what_is_refused_before_anything_is_read(settings, files, monkeypatch):
    """A score out of range; and several processes: the heads are trained past what would add up their gradients."""
    with pytest.raises(ValueError, match="pairs.tsv: the score 5 is not from 0 to 4. Correct it, or set lowes"):
        train_freeze(settings(highest_score=4.0), files / "out", progress=False)
    monkeypatch.setattr(SentenceTransformerTrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match="FreezeTraining runs in one process, but there are 2"):
        train_freeze(settings(), files / "out", progress=False)
    assert not (files / "out").exists()


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
    with pytest.raises(ValueError, match="States are not finite: the model overflows in torch.float32"):
        cache.add(["another text"])


def test_a_model_that_looks_states_up(module, tmp_path):
    cache, autoencoder = StatesCache(tmp_path, module), LayerwiseAutoencoder(3, 32)
    model = ModelOnStates.of(autoencoder, cache)
    found = model.encode(TEXTS, batch_size=2, convert_to_tensor=True)
    assert torch.allclose(found.cpu(), autoencoder.embed(cache.states(TEXTS).to(model.device)).cpu(), atol=1e-6)
    with pytest.raises(ValueError, match="prompt='query: ': cached states have none"):
        model.encode(TEXTS, prompt="query: ")
