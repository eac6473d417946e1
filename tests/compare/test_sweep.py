"""One forward pass gives what each module gives on its own."""

from __future__ import annotations

import warnings

import pytest
import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.compare.sweep import RecipeSweep

from .. import backbones
from ..backbones import ARCHITECTURES, TEXTS
from ..conftest import forward_passes, long, pipeline, relative_error

#: One like Llama, and one with sliding windows; then the rest.
FEW = ("llama", "mistral_window")
VARIED = [*FEW, *(long(name) for name in ARCHITECTURES if name not in (*FEW, *backbones.OWN_ATTENTION))]
POOLINGS = tuple(Pooling.POOLING_MODES)
LONG = ["word " * 70, "the cat " * 30, "a fox " * 300, "the quick brown fox jumps", "x " * 85]


def module(backbone, recipe):
    if recipe == "Classical":
        return CausalTransformer(backbone)
    name, _, layer = recipe.partition(", layer ")
    kind, copies = name.split("-")
    below = {"output_layer": int(layer)} if layer else {}
    return {"Echo": EchoModule, "ReBA": ReBAModule}[kind](backbone, repetitions=int(copies), **below)


@pytest.fixture(autouse=True)
def _quiet_fallback():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A text without tokens")
        yield


def assert_like_each_alone(
    backbone, texts, repetitions=3, poolings=("mean", "lasttoken"), prompt=None, batch_size=4, layers=(1,)
):
    sweep = RecipeSweep(backbone, repetitions, poolings, layers)
    embeddings = sweep.encode(texts, prompt=prompt, batch_size=batch_size)
    words = list(sweep.token_embeddings(texts, prompt=prompt, batch_size=batch_size))
    assert list(embeddings) == [(recipe, pooling) for recipe in sweep.recipes for pooling in poolings]
    assert all(tuple(of_text) == sweep.recipes for of_text in words)
    for recipe in sweep.recipes:
        # Its poolings stand side by side.
        alone = pipeline(module(backbone, recipe), tuple(poolings)).encode(texts, prompt=prompt, output_value=None)
        for number, (item, of_text) in enumerate(zip(alone, words, strict=True)):
            vectors = item["sentence_embedding"].split(of_text[recipe].shape[-1])
            for pooling, expected in zip(poolings, vectors, strict=True):
                found = embeddings[recipe, pooling][number]
                assert (found.dtype, found.device.type) == (torch.float32, "cpu")
                assert (found - expected).norm() <= 1e-5 * expected.norm(), (recipe, pooling)
            expected = item["token_embeddings"][item["attention_mask"].bool()]
            assert of_text[recipe].shape == expected.shape
            assert (of_text[recipe] - expected).norm() <= 1e-5 * expected.norm(), recipe


@pytest.mark.parametrize("name", VARIED)
def test_each_recipe_on_every_architecture(name, shared):
    assert_like_each_alone(shared(name), [*TEXTS[:3], "", LONG[1]], 3 if name == "llama" else 2)


@pytest.mark.parametrize(("kind", "prompt"), [("bert", "query: "), ("sentencepiece", None)])
def test_every_pooling_with_special_tokens_and_prompts(kind, prompt, shared):
    assert_like_each_alone(shared("llama", kind), [TEXTS[0], "", LONG[2]], 2, POOLINGS, prompt)


class TestLength:
    """A module on its own truncates where its own copies no longer fit."""

    def test_each_recipe_truncates_as_on_its_own(self, shared):
        assert_like_each_alone(shared("gpt2", "bert"), [*LONG, TEXTS[0]], 2, ["mean"], "query: ", 32)

    @pytest.mark.parametrize(("limit", "side"), [(1, "right"), (85, "left")])
    def test_max_seq_length_and_truncation_from_the_left(self, limit, side, tmp_path):
        path = backbones.save(backbones.backbone("llama"), tmp_path, truncation_side=side)
        backbone = CausalTransformer(path)
        backbone.max_seq_length = limit
        assert_like_each_alone(backbone, [*LONG, TEXTS[0]], poolings=["mean"])

    def test_no_more_passes_than_lengths(self, backbone_path):
        """One for texts that fit; one for each length that a longer text is truncated to."""
        sweep = RecipeSweep(CausalTransformer(backbone_path()), 3)
        for tokens, expected in ((84, 1), (86, 2), (999, 3)):
            with forward_passes() as passes:
                sweep.encode(["z" * tokens])
            assert len(passes) == expected


def test_last_pooling_alone_computes_one_row(shared, monkeypatch):
    texts, widths = [*TEXTS, *LONG, ""], []
    everything = RecipeSweep(shared("qwen3")).encode(texts)
    original = ReBAModule.look_back

    def noted(self, layout, **kwargs):
        weights, states = original(self, layout, **kwargs)
        widths.append(weights.shape[1])
        return weights, states

    monkeypatch.setattr(ReBAModule, "look_back", noted)
    for key, found in RecipeSweep(shared("qwen3"), poolings=["lasttoken"]).encode(texts).items():
        assert relative_error(found, everything[key]) < 1e-5
    assert set(widths) == {1}


def test_empty_texts_are_zero_vectors_and_one_warning(backbone_path):
    sweep = RecipeSweep(CausalTransformer(backbone_path("llama", "bert")), poolings=POOLINGS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        embeddings = sweep.encode(["", "the cat", " "], batch_size=1)
        words = list(sweep.token_embeddings(["", "the cat"]))
    assert len([warning for warning in caught if "without tokens" in str(warning.message)]) == 1
    for vectors in embeddings.values():
        assert not vectors[[0, 2]].any()
        assert vectors[1].all()
    assert all(torch.equal(vector, torch.zeros(1, 32)) for vector in words[0].values())
    assert {tuple(vectors.shape) for vectors in sweep.encode([]).values()} == {(0, 32)}
    assert list(sweep.token_embeddings([])) == []


def test_parts_of_a_batch_give_the_same(backbone_path, monkeypatch):
    sweep = RecipeSweep(CausalTransformer(backbone_path()))
    texts = [*TEXTS[:3], LONG[1], ""]
    expected = sweep.encode(texts)
    for budget, value in (("CPU_TOKENS", 300), ("WEIGHT_BUDGET", 1)):
        with monkeypatch.context() as patched:
            patched.setattr(ReBAModule, budget, value)
            for key, found in sweep.encode(texts).items():
                assert relative_error(found, expected[key]) < 1e-5


def test_a_model_left_in_training_is_read_in_inference(tmp_path):
    config = backbones.config("gpt2")
    config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = 0.5
    path = backbones.save(backbones.randomize(type(backbones.backbone("gpt2"))(config)), tmp_path)
    # Any module, or ST's, is a backbone.
    for backbone in (CausalTransformer(path), Transformer(path), EchoModule(path, bidirectional_layers=1)):
        expected = pipeline(CausalTransformer(path)).encode(TEXTS)
        backbone.train()
        found = RecipeSweep(backbone, 2).encode(TEXTS)["Classical", "mean"]
        assert relative_error(found, expected) < 1e-5
        assert not found.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repetitions": 0}, "repetitions=0: give a whole number from 1"),
        ({"repetitions": 300}, "leave no room for 300 copies"),
        ({"poolings": "mean"}, r"poolings='mean': give a list of one or more of \['cls', 'lasttoken', 'max', 'mean'"),
        ({"poolings": ["mean", "last"]}, r"poolings=\['mean', 'last'\]: give a list"),
        ({"layers": [4]}, r"layers=\[4\]: LlamaModel has 3; give 1 to 3"),
    ],
)
def test_refused_settings(arguments, message, backbone_path):
    with pytest.raises(ValueError, match=message):
        RecipeSweep(backbone_path(), **arguments)


@pytest.mark.parametrize("method", ["encode", "token_embeddings"])
def test_refused_calls(method, backbone_path):
    sweep = RecipeSweep(backbone_path())
    for texts, given, message in (
        ("a text", {}, "texts is one string: give a list"),
        (["a text"], {"batch_size": 0}, "batch_size=0: give the texts to run at a time, 1 or more"),
        (["a text", 3], {}, r"texts\[1\] is a int: give a list of strings"),
        (["a text"], {"prompt": "word " * 300}, "leave no room for 3 copies"),
    ):
        with pytest.raises(ValueError, match=message):
            list(getattr(sweep, method)(texts, **given))
