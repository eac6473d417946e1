from __future__ import annotations

import numpy as np
import pytest
import torch

from st_reba import CausalTransformer
from st_reba.compare import Recipes
from st_reba.compare.answer import WITHOUT
from st_reba.data.demo import demo_sentences
from st_reba.recipes import Recipe, default_recipes, every_row, find, random_weights, worth_trying
from st_reba.recipes.lookup import controls_of, without_repeats
from st_reba.recipes.rows import FILTERS, IDF, PARTWISE, SUM

from ..backbones import TEXTS
from ..conftest import pipeline, relative_error


def test_the_recipes():
    recipes = default_recipes()
    keys = [recipe.result for recipe in recipes]
    assert len(set(keys)) == len(keys)
    swept = ("Classical", "Echo-2", "Echo-3", "ReBA-1", "ReBA-2", "ReBA-3", "Bidirectional", "ReBA-2, bidirectional")
    assert {f"{method}, mean" for method in swept} <= set(keys)
    assert {f"Classical, {name}, {pooling}" for name in FILTERS for pooling in ("mean", "last")} <= set(keys)
    assert {f"Classical, {IDF}, mean", f"Early and late, {PARTWISE}, mean", f"Echo topic, {SUM}, mean"} <= set(keys)
    assert {"PromptEOL, last", "RT-2, last", "MetaEOL, mean", "KV re-routing, mean"} <= set(keys)
    assert not any(recipe.control for recipe in recipes)
    # Rows that stand for several have no words: those differ.
    merged = {recipe.result: recipe.same_as for recipe in recipes if recipe.same_as}
    assert merged == {"Classical, last": ("ReBA-1", "Bidirectional"), "Echo-2, last": ("Echo-2, bidirectional",)}
    worded = {recipe.method for recipe in recipes if recipe.words}
    assert {*swept} <= worded
    assert not worded & {"PromptEOL", "RT-2", "MetaEOL", "KV re-routing", "Value aggregation", "Contrastive prompting"}


@pytest.mark.parametrize("architecture", ["llama", "mistral_window"])
def test_what_one_row_stands_for_is_the_same_by_definition(architecture, backbone_path):
    backbone = CausalTransformer(backbone_path(architecture))
    names = {row.key: row.name for row in every_row()}
    same = {row.name: names[row.same_if_last] for row in every_row() if row.same_if_last}
    assert same == {"ReBA-1": "Classical", "Bidirectional": "Classical", "Echo-2, bidirectional": "Echo-2"}
    vectors = {
        (name, pooling): torch.nn.functional.normalize(
            pipeline(find(name).build(backbone), pooling).encode(TEXTS, convert_to_tensor=True)
        )
        for name in {*same, *same.values()}
        for pooling in ("mean", "lasttoken")
    }
    for name, other in same.items():
        assert torch.allclose(vectors[name, "lasttoken"], vectors[other, "lasttoken"], atol=1e-5)
        assert not torch.allclose(vectors[name, "mean"], vectors[other, "mean"], atol=1e-3)


def test_a_row_stands_only_for_what_was_asked():
    asked = [Recipe(find(key).row, pooling) for key in ("classical", "echo-2", "bidirectional")
             for pooling in ("mean", "last")]  # fmt: skip
    kept = without_repeats(asked)
    assert {recipe.result for recipe in asked} - {recipe.result for recipe in kept} == {"Bidirectional, last"}
    assert {recipe.result: recipe.same_as for recipe in kept if recipe.same_as} == {
        "Classical, last": ("Bidirectional",)
    }
    alone = [recipe for recipe in asked if recipe.method == "Bidirectional"]
    assert without_repeats(alone) == alone


@pytest.mark.parametrize("repetitions", [1, 3])
def test_no_more_copies_than_asked(repetitions, roomy_path):
    roomy = CausalTransformer(roomy_path)
    modules = {recipe.result: recipe.build(roomy) for recipe in default_recipes(repetitions)}
    assert max(module.copies for module in modules.values()) == repetitions
    for recipe in default_recipes(repetitions):
        assert recipe.copies in (None, modules[recipe.result].copies)


def test_ten_are_worth_trying():
    few = worth_trying()
    assert len({recipe.result for recipe in few}) == len(few) == 10
    # What one has without a recipe, which the answer holds the others against.
    assert WITHOUT.keys() <= {recipe.result for recipe in few}
    assert max(recipe.copies for recipe in few if recipe.copies) == 2
    assert not any(recipe.control for recipe in few)


def test_all_that_are_worth_trying_run(roomy_path):
    roomy = CausalTransformer(roomy_path)
    made = Recipes(roomy, worth_trying(demo_sentences()[:40]), controls=False)
    assert not made.skipped
    texts = TEXTS[:3]
    for recipe, vectors in zip(made.all, made.embed(texts).values(), strict=True):
        assert relative_error(recipe.model(roomy).encode(texts), vectors) < 1e-5


def test_random_weights_are_other_weights_of_the_same_shape(backbone_path):
    backbone = CausalTransformer(backbone_path())
    control = random_weights(backbone)
    assert control.tokenizer is backbone.tokenizer
    own, others = backbone.model.state_dict(), control.model.state_dict()
    assert {name: value.shape for name, value in own.items()} == {name: value.shape for name, value in others.items()}
    assert not torch.equal(own["embed_tokens.weight"], others["embed_tokens.weight"])
    before = torch.random.get_rng_state()
    vectors = [pipeline(random_weights(backbone)).encode(TEXTS) for _ in range(2)]
    assert np.array_equal(*vectors)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_control_of_a_filter_reads_no_trained_head(backbone_path):
    """The head of a control on random weights is its own: untied models would else lend it that of the checkpoint."""
    backbone = CausalTransformer(backbone_path("llama"))
    assert not backbone.model.config.tie_word_embeddings
    control = random_weights(backbone)
    expected = find("classical+filtered").model(control)[2]
    weight = control.model.get_input_embeddings().weight.double()
    values = torch.linalg.svdvals(weight @ expected.directions.double().T)
    middle = torch.linalg.svdvals(weight)[expected.low : expected.low + len(values)]
    assert torch.allclose(values, middle, rtol=1e-4)


def test_a_recipe_stands_beside_controls_behind_the_same_filter():
    recipe = find("early-late")
    bag = f"Bag of input embeddings, {PARTWISE}, mean"
    assert [(control.kind, control.name, control.called) for control in controls_of(recipe)] == [
        ("tf-idf", "tf-idf, mean", "tf-idf, without any model"),
        ("bag", "Bag of input embeddings, mean", "the bag of input embeddings"),
        ("filtered bag", bag, f"the bag of input embeddings, {PARTWISE} as well"),
        ("random", f"Random weights, {recipe.result}", "itself on random weights"),
    ]
    assert recipe.filter.settings((0.3, 0.7)) == {"shrinkage": 10.0, "shares": (0.3, 0.7)}
