"""Passes of which several recipes come: each recipe is as it is alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from st_reba import CausalTransformer
from st_reba.compare.recipes import ModulePass, TopicPass, passes_of, reading
from st_reba.recipes.lookup import find
from st_reba.recipes.recipe import Wording

from .. import backbones
from ..backbones import TEXTS
from ..conftest import forward_passes, long, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")
#: Short ones: architectures of few positions have room for them.
BESIDE = {"topic": Wording("own", 'It "{text}" means:'), "echo-topic": Wording("own", 'Now "{text}" is "{text}" of:')}
#: Windows, learned positions, and masks that cannot be replaced.
EACH = [
    name if name in ("llama", "gemma2_softcap", "gpt2", "bloom") else long(name) for name in backbones.ARCHITECTURES
]


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
    assert run.tokens([]) == 0
    assert run.tokens(3 * texts) == pytest.approx(3 * run.tokens(texts))


@pytest.mark.parametrize("architecture", EACH)
@pytest.mark.parametrize("key", BESIDE)
def test_every_architecture(key, architecture, shared):
    recipes = [replace(find(key), wording=BESIDE[key], layer=layer) for layer in (None, 2)]
    assert_as_alone(TopicPass(shared(architecture), recipes), TEXTS, "query: ")


def test_in_half_precision_it_differs_by_rounding(roomy_path):
    backbone = CausalTransformer(roomy_path, model_kwargs={"dtype": torch.bfloat16})
    assert_as_alone(TopicPass(backbone, candidates("echo-topic", [None, 2])[:2]), TEXTS, tolerance=0.02)


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
