"""One forward pass gives what each module gives on its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.compare.recipes import ModulePass, TopicPass, passes_of, reading
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
    assert list(sweep.token_embeddings([])) == []
    texts = [*TEXTS[:3], LONG[1], ""]
    expected = sweep.encode(texts)
    monkeypatch.setattr(ReBAModule, "CPU_TOKENS", 300)
    for key, found in sweep.encode(texts).items():
        assert relative_error(found, expected[key]) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repetitions": 0}, "repetitions=0: give a whole number from 1"),
        ({"repetitions": 300}, "leave no room for 300 copies"),
        ({"poolings": "mean"}, r"poolings='mean': give a list of one or more of \['cls', 'lasttoken', 'max', 'mean'"),
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


def test_a_model_left_in_training_is_read_in_inference(tmp_path):
    config = backbones.config("gpt2")
    config.resid_pdrop = 0.5
    path = backbones.save(backbones.randomize(type(backbones.backbone("gpt2"))(config)), tmp_path)
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
        alone = recipe.model(run.backbone, filtered=False).encode(texts, prompt=prompt, convert_to_tensor=True)
        assert relative_error(own, alone.float().cpu()) < tolerance, recipe.name


@pytest.fixture(scope="module")
def roomy(roomy_path):
    return CausalTransformer(roomy_path)


@pytest.mark.parametrize("key", ["topic", "echo-topic", "echo-topic-zh"])
def test_topic_after_several_layers(key, roomy):
    """One pass a wording. A text without tokens is a zero vector."""
    texts = [*TEXTS, "", "a"]
    passes, _ = passes_of(roomy, candidates(key, [None, 2, 1]))
    assert [(type(run), len(run.recipes)) for run in passes] == 4 * [(TopicPass, 3)]
    for run in passes[:2]:
        assert_as_alone(run, texts, "query: ", batch_size=4)
    with forward_passes() as forwards:
        run.encode(texts[:3], None, 32)
    # One for what stands before the texts, and one for what follows.
    assert len(forwards) == 2
    assert run.tokens(3 * texts) == pytest.approx(3 * run.tokens(texts))


@pytest.mark.parametrize("architecture", EVERY)
def test_candidates_on_every_architecture(architecture, shared):
    """A short wording: architectures of few positions have room for it."""
    wording = Wording("own", 'Now "{text}" is "{text}" of:')
    recipes = [replace(find("echo-topic"), wording=wording, layer=layer) for layer in (None, 2)]
    assert_as_alone(TopicPass(shared(architecture), recipes), TEXTS, "query: ")


def test_what_cannot_run_is_left_out_alone(roomy):
    """And what changes how the model reads runs on its own."""
    too_long = replace(find("topic"), wording=Wording("much", f'{2100 * "a "}"{{text}}"'))
    passes, skipped = passes_of(roomy, [*candidates("topic", [None, 2])[:2], too_long])
    assert [recipe for recipe, _ in skipped] == [too_long]
    assert [(type(run), len(run.recipes)) for run in passes] == [(TopicPass, 2)]
    row = replace(find("topic").row, settings={"template": "topic", "bidirectional_layers": 1})
    passes, _ = passes_of(roomy, [replace(find("topic"), row=row, layer=layer) for layer in (None, 2)])
    assert [type(run) for run in passes] == 2 * [ModulePass]


@pytest.mark.parametrize("key", ["echo-2", "prompteol", "knowledge", "classical"])
def test_rows_that_read_one_layer(key, roomy):
    """Also one whose own end is the last but one, without the final norm."""
    recipe = find(key)
    for pooling in recipe.poolings:
        recipes = [replace(recipe, pooling=pooling, layer=layer) for layer in (None, 3, 2, 1)]
        [run], _ = passes_of(roomy, recipes)
        assert run.reader is not None
        assert_as_alone(run, TEXTS, "query: ")
