"""Recipes in several wordings, after several layers: each as it is alone, and what they begin alike with runs once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from st_reba import CausalTransformer, TopicModule
from st_reba.compare import Recipes
from st_reba.compare.recipes import ModulePass, WordingsPass, passes_of, reading
from st_reba.lm.trees import Trees
from st_reba.recipes.lookup import find
from st_reba.recipes.recipe import Wording
from st_reba.recipes.rows import CHANGES

from .. import backbones
from ..backbones import TEXTS
from ..conftest import forward_passes, long, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")
TOLERANCE = 1e-5
#: Begins as no other does.
OWN = Wording("my own", 'The word for "{text}" is "')
KEYS = ("topic", "echo-topic", "topic-zh", "echo-topic-zh")
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


def alone(recipe, backbone, texts, prompt=None):
    return recipe.model(backbone, filtered=False).encode(texts, prompt=prompt, convert_to_tensor=True).float().cpu()


def assert_as_alone(run, texts, prompt=None, batch_size=32, tolerance=TOLERANCE):
    found = run.encode(texts, prompt, batch_size)
    assert found.keys() == {reading(recipe) for recipe in run.recipes}
    for recipe in run.recipes:
        own = found[reading(recipe)]
        assert own.dtype == torch.float32
        assert relative_error(own, alone(recipe, run.backbone, texts, prompt)) < tolerance, recipe.name


@pytest.fixture(scope="module")
def roomy(roomy_path):
    return CausalTransformer(roomy_path)


@pytest.mark.parametrize("key", KEYS)
def test_each_is_as_it_is_alone(key, roomy):
    """Those of a row in one tree; a prompt of the user's own beside it. A text without tokens is a zero vector."""
    texts, recipes = [*TEXTS, "", "a"], candidates(key, [None, 2, 1], [OWN])
    run = WordingsPass(roomy, recipes)
    assert len({reading(recipe) for recipe in recipes}) == len(recipes) == 15
    assert_as_alone(run, texts, "query: ", batch_size=4)
    with forward_passes() as passes:
        run.encode(texts[:3], None, 32)
    # One for what stands before the texts, and one for what follows, of each beginning.
    assert len(passes) == 4


#: Short ones: architectures of few positions have room for them.
BESIDE = {
    "topic": [
        Wording(name, f'Here is "{{text}}" {name}') for name in ("is about:", "means:", "is", "means, in short:")
    ],
    "echo-topic": [
        Wording(name, f'Now "{{text}}" is "{{text}}" {name}') for name in ("about:", "of the", "of the topic:")
    ],
}


@pytest.mark.parametrize("architecture", EACH)
@pytest.mark.parametrize("key", BESIDE)
def test_every_architecture(key, architecture, shared):
    recipes = [replace(find(key), wording=wording, layer=layer) for wording in BESIDE[key] for layer in (None, 2)]
    run = WordingsPass(shared(architecture), recipes)
    assert_as_alone(run, TEXTS, "query: ")
    assert len(run.trees) == (len(BESIDE[key]) if architecture in backbones.OWN_ATTENTION else 1)


# Quotation marks and ends that run together with what stands around a text; and texts that are cut, at other places in
# each wording.
SHORT = st.text(st.sampled_from('ab "。我\n?'), max_size=12)
LONG = st.integers(60, 400).map(lambda count: ("The dog chased " * count)[: 4 * count])


@given(st.lists(SHORT | LONG, min_size=1, max_size=6), st.sampled_from(["", "query: ", '"']), st.integers(1, 4))
@pytest.mark.parametrize("kind", ["bytes", "greedy", "bert", "sentencepiece"])
@pytest.mark.parametrize("key", BESIDE)
def test_whatever_the_texts_are(key, kind, shared, texts, prompt, batch_size):
    recipes = [replace(find(key), wording=wording, layer=layer) for wording in BESIDE[key] for layer in (None, 1)]
    found = WordingsPass(shared("gpt2", kind), recipes).encode(texts, prompt, batch_size)
    for recipe in recipes:
        expected = alone(recipe, shared("gpt2", kind), texts, prompt)
        assert (found[reading(recipe)] - expected).abs().max() < TOLERANCE * max(1, expected.abs().max())


def test_in_half_precision_it_differs_by_rounding(roomy_path):
    backbone = CausalTransformer(roomy_path, model_kwargs={"dtype": torch.bfloat16})
    assert_as_alone(WordingsPass(backbone, candidates("echo-topic", [None, 2])), TEXTS, tolerance=0.02)


@pytest.mark.parametrize("key", ["topic", "echo-topic"])
def test_it_counts_the_nodes_that_run(key, roomy, monkeypatch):
    run, texts = WordingsPass(roomy, candidates(key, [2, 1], [OWN])), [text.lower() for text in TEXTS]
    nodes, ran = [], Trees.run
    monkeypatch.setattr(Trees, "run", lambda self, *given: nodes.extend(self.layout.lengths) or ran(self, *given))
    run.encode(texts, None, 32)
    # Two layers of three run.
    assert run.tokens(texts) == pytest.approx(int(sum(nodes)) * 2 / 3)
    assert run.tokens(3 * texts) == pytest.approx(3 * run.tokens(texts))
    assert run.tokens([]) == 0


def test_parts_are_as_large_as_those_of_modules(roomy, monkeypatch):
    """Of nodes, whatever the layouts have together."""
    monkeypatch.setattr(TopicModule, "CPU_TOKENS", 300)
    run, sizes, ran = WordingsPass(roomy, candidates("topic", [None])), [], Trees.run
    monkeypatch.setattr(
        Trees, "run", lambda self, *given: sizes.append(self.layout.input_ids.shape) or ran(self, *given)
    )
    run.encode(8 * TEXTS, None, 64)
    assert all(rows == 1 or rows * nodes <= 300 for rows, nodes in sizes)
    # What stands before all texts, longer than that, is no part of it.
    assert any(rows > 1 for rows, _ in sizes)


def test_what_comes_out_of_one_pass(roomy):
    recipes = [*candidates("topic", [None, 2]), *candidates("echo-topic", [None]), *candidates("topic-zh", [None])[:1]]
    recipes += [replace(find("echo-2"), layer=layer) for layer in (None, 2)]
    passes, skipped = passes_of(roomy, recipes)
    assert not skipped
    assert [(type(run), len(run.recipes)) for run in passes] == [
        (WordingsPass, 8), (WordingsPass, 4), (ModulePass, 1), (ModulePass, 2)
    ]  # fmt: skip


def test_what_cannot_run_is_left_out_alone(roomy):
    """And what changes how the model reads runs on its own."""
    too_long = replace(find("topic"), wording=Wording("much", f'{2100 * "a "}"{{text}}"'))
    passes, skipped = passes_of(roomy, [*candidates("topic", [None]), too_long])
    assert [recipe for recipe, _ in skipped] == [too_long]
    assert [type(run) for run in passes] == 4 * [ModulePass]
    changed = [
        replace(find("topic"), row=CHANGES["re-routed"].row(find("topic").row), layer=layer) for layer in (None, 2)
    ]
    passes, _ = passes_of(roomy, changed)
    assert [type(run) for run in passes] == 2 * [ModulePass]


@pytest.mark.parametrize("key", ["echo-2", "prompteol", "prompteol-zh", "knowledge", "pretended-cot", "classical"])
def test_rows_that_read_one_layer(key, roomy):
    """Also one whose own end is the last but one, without the final norm."""
    recipe = find(key)
    for pooling in recipe.poolings:
        recipes = [replace(recipe, pooling=pooling, layer=layer) for layer in (None, 3, 2, 1)]
        [run], _ = passes_of(roomy, recipes)
        assert run.reader is not None
        assert_as_alone(run, TEXTS, "query: ")


def test_a_comparison_embeds_and_keeps_them(roomy):
    recipes = [*candidates("topic", [None, 2]), *candidates("echo-topic", [None, 1])]
    made = Recipes(roomy, [replace(recipe, part=None) for recipe in recipes], controls=False)
    found = {key: made.vectors(key, TEXTS) for key in made.keys}
    made.add(TEXTS)
    assert len(found) == 16
    for recipe in made.all:
        expected = alone(recipe, roomy, TEXTS)
        assert relative_error(found[recipe.result], expected) < TOLERANCE
        assert relative_error(made.vectors(recipe.result, TEXTS), expected) < TOLERANCE
