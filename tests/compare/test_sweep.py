"""One forward pass gives what each module gives on its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba import CausalTransformer, EchoModule, ReBAModule, build
from st_reba.compare import Recipes
from st_reba.compare.recipes import LayersPass, ModulePass, Modules, TopicPass, reading
from st_reba.compare.sweep import RecipeSweep
from st_reba.recipes.lookup import find
from st_reba.recipes.recipe import Wording

from .. import backbones
from ..backbones import ARCHITECTURES, TEXTS
from ..conftest import forward_passes, long, pipeline, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")
#: One like Llama, and one with sliding windows; then the rest.
FEW = ("llama", "mistral_window")
VARIED = [*FEW, *(long(name) for name in ARCHITECTURES if name not in (*FEW, *backbones.OWN_ATTENTION))]
#: With those whose masks cannot be replaced.
EVERY = [name if name in (*FEW, "bloom") else long(name) for name in ARCHITECTURES]
POOLINGS = tuple(Pooling.POOLING_MODES)
LONG = ["word " * 70, "the cat " * 30, "a fox " * 300, "the quick brown fox jumps", "x " * 85]


def module(backbone, recipe):
    if recipe == "Classical":
        return CausalTransformer(backbone)
    name, _, layer = recipe.partition(", layer ")
    kind, copies = name.split("-")
    below = {"output_layer": int(layer)} if layer else {}
    return {"Echo": EchoModule, "ReBA": ReBAModule}[kind](backbone, repetitions=int(copies), **below)


def assert_like_each_alone(
    backbone, texts, repetitions=3, poolings=("mean", "lasttoken"), prompt=None, batch_size=4, layers=(1,)
):
    sweep = RecipeSweep(backbone, repetitions, poolings, layers)
    embeddings = sweep.encode(texts, prompt=prompt, batch_size=batch_size)
    assert list(embeddings) == [(recipe, pooling) for recipe in sweep.recipes for pooling in poolings]
    for recipe in sweep.recipes:
        # Its poolings come one after another.
        alone = pipeline(module(backbone, recipe), tuple(poolings)).encode(texts, prompt=prompt, convert_to_tensor=True)
        for pooling, expected in zip(poolings, alone.chunk(len(poolings), dim=1), strict=True):
            found = embeddings[recipe, pooling]
            assert (found.dtype, found.device.type) == (torch.float32, "cpu")
            difference = (found - expected).norm(dim=1)
            assert (difference <= 1e-5 * expected.norm(dim=1)).all(), (recipe, pooling)


@pytest.mark.parametrize("name", VARIED)
def test_each_recipe_on_every_architecture(name, shared):
    assert_like_each_alone(shared(name), [*TEXTS[:3], "", LONG[1]], 3 if name == "llama" else 2)


@pytest.mark.parametrize(("kind", "prompt"), [("bert", "query: "), ("sentencepiece", None)])
def test_every_pooling_with_special_tokens_and_prompts(kind, prompt, shared):
    assert_like_each_alone(shared("llama", kind), [TEXTS[0], "", LONG[2]], 2, POOLINGS, prompt)


def test_each_recipe_truncates_as_on_its_own(shared):
    """Where its own copies no longer fit."""
    assert_like_each_alone(shared("gpt2", "bert"), [*LONG, TEXTS[0]], 2, ["mean"], "query: ", 32)


@pytest.mark.parametrize(("limit", "side"), [(1, "right"), (85, "left")])
def test_max_seq_length_and_truncation_from_the_left(limit, side, tmp_path):
    path = backbones.save(backbones.backbone("llama"), tmp_path, truncation_side=side)
    backbone = CausalTransformer(path)
    backbone.max_seq_length = limit
    assert_like_each_alone(backbone, [*LONG, TEXTS[0]], poolings=["mean"])


def test_last_pooling_alone(shared):
    """It computes one row."""
    texts = [*TEXTS, *LONG, ""]
    everything = RecipeSweep(shared("qwen3")).encode(texts)
    for key, found in RecipeSweep(shared("qwen3"), poolings=["lasttoken"]).encode(texts).items():
        assert relative_error(found, everything[key]) < 1e-5


def test_parts_of_a_batch_give_the_same(backbone_path, monkeypatch):
    """And no text none."""
    sweep = RecipeSweep(CausalTransformer(backbone_path()))
    assert {tuple(vectors.shape) for vectors in sweep.encode([]).values()} == {(0, 32)}
    texts = [*TEXTS[:3], LONG[1], ""]
    expected = sweep.encode(texts)
    monkeypatch.setattr(ReBAModule, "TOKENS_PER_THREAD", 300)
    for key, found in sweep.encode(texts).items():
        assert relative_error(found, expected[key]) < 1e-5


REFUSED_SETTINGS = [
    ({"repetitions": 0}, "repetitions=0: give a whole number from 1"),
    ({"repetitions": 300}, "leave no room for 300 copies"),
    ({"layers": [4]}, r"layers=\[4\]: LlamaModel has 3; give 1 to 3"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED_SETTINGS)
def test_refused_settings(arguments, message, backbone_path):
    with pytest.raises(ValueError, match=message):
        RecipeSweep(backbone_path(), **arguments)


def test_refused_calls(backbone_path):
    sweep = RecipeSweep(backbone_path())
    with pytest.raises(ValueError, match="batch_size=0: give a whole number of 1 or more"):
        sweep.encode(["a text"], batch_size=0)
    with pytest.raises(ValueError, match="leave no room for 3 copies"):
        sweep.encode(["a text"], prompt="word " * 300)


def test_a_model_left_in_training_is_read_in_inference(tmp_path):
    path = backbones.save(backbones.backbone("gpt2", resid_pdrop=0.5), tmp_path)
    expected = pipeline(CausalTransformer(path)).encode(TEXTS)
    found = RecipeSweep(CausalTransformer(path).train(), 2).encode(TEXTS)["Classical", "mean"]
    assert relative_error(found, expected) < 1e-5


# Candidates of a row


def candidates(key, layers, wordings=()):
    """A row in all its wordings, read after each of these layers."""
    recipe = find(key)
    return [
        replace(recipe, wording=wording, layer=layer)
        for wording in (None, *recipe.row.wordings, *wordings)
        for layer in layers
    ]


def assert_as_alone(run, texts, prompt=None, batch_size=32, tolerance=1e-5):
    found = run.encode(texts, prompt, batch_size)
    assert found.keys() == {reading(recipe) for recipe in run.recipes}
    for recipe in run.recipes:
        own = found[reading(recipe)]
        assert own.dtype == torch.float32
        model = build(run.backbone, replace(recipe, post_processor=None), normalize=False, device="cpu")
        alone = model.encode(texts, prompt=prompt, convert_to_tensor=True)
        assert relative_error(own, alone.float().cpu()) < tolerance, recipe.name


@pytest.mark.parametrize("key", ["topic", "echo-topic", "echo-topic-zh"])
def test_topic_after_several_layers(key, roomy):
    """One pass a wording. A text without tokens is a zero vector."""
    texts = [*TEXTS, "", "a"]
    passes = Recipes(roomy, candidates(key, [None, 2, 1]), controls=False).passes
    assert [(type(run), len(run.recipes)) for run in passes] == 4 * [(TopicPass, 3)]
    for run in passes[:2]:
        assert_as_alone(run, texts, "query: ", batch_size=4)
    with forward_passes() as forwards:
        run.encode(texts[:3], None, 32)
    # One for what stands before the texts, and one for what follows.
    assert len(forwards) == 2
    assert run.tokens(3 * texts) == pytest.approx(3 * run.tokens(texts), rel=0.1)


@pytest.mark.parametrize("architecture", EVERY)
def test_candidates_on_every_architecture(architecture, shared):
    """A short wording: architectures of few positions have room for it."""
    wording = Wording("own", 'Now "{text}" is "{text}" of:')
    recipes = [replace(find("echo-topic"), wording=wording, layer=layer) for layer in (None, 2)]
    assert_as_alone(TopicPass(Modules(shared(architecture)), recipes), TEXTS, "query: ")


def test_what_cannot_run_is_left_out_alone(roomy):
    """And what changes how the model reads runs on its own."""
    too_long = replace(find("topic"), wording=Wording("much", f'{2100 * "a "}"{{text}}"'))
    recipes = Recipes(roomy, [*candidates("topic", [None, 2])[:2], too_long], controls=False)
    assert [name for name, _ in recipes.skipped] == [too_long.result]
    assert [(type(run), len(run.recipes)) for run in recipes.passes] == [(TopicPass, 2)]
    row = replace(find("topic").row, settings={"template": "topic", "bidirectional_layers": 1})
    made = [replace(find("topic"), row=row, layer=layer) for layer in (None, 2)]
    assert [type(run) for run in Recipes(roomy, made, controls=False).passes] == 2 * [ModulePass]


@pytest.mark.parametrize("key", ["echo-2", "prompteol", "knowledge", "classical"])
def test_rows_that_read_one_layer(key, roomy):
    """Also one whose own end is the last but one, without the final norm."""
    recipe = find(key)
    for pooling in recipe.poolings:
        recipes = [replace(recipe, pooling=pooling, layer=layer) for layer in (None, 3, 2, 1)]
        [run] = Recipes(roomy, recipes, controls=False).passes
        assert type(run) is LayersPass
        assert_as_alone(run, TEXTS, "query: ")
