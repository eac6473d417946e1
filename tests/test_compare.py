from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.compare import compare, default_recipes, number_of_steps, random_weights
from st_reba.data import Pairs
from st_reba.evaluation import OddOneOutEvaluator, Question

from .backbones import TEXTS
from .conftest import pipeline

PAIRS = Pairs(TEXTS, TEXTS[::-1], [1.0, 2.0, 5.0, 2.5, 1.5])
QUESTIONS = [Question("cat", ("a cat ran", "the cat sat", "my cat eats", "cat is a word"), 3)]


@pytest.fixture(scope="module")
def results(backbone_path):
    steps = []
    backbone = CausalTransformer(backbone_path())
    found = compare(backbone, PAIRS, QUESTIONS, on_step=steps.append)
    assert len(steps) == number_of_steps(default_recipes(), QUESTIONS)
    return {(result.recipe.name, result.recipe.pooling): result for result in found}


def test_the_recipes(results):
    methods = ["Classical", "Echo-2", "Echo-3", "ReBA-2", "ReBA-3"]
    methods += ["Bidirectional", "Echo-2, bidirectional", "ReBA-2, bidirectional"]
    recipes = {(method, pooling) for method in methods for pooling in ("mean", "last")}
    recipes |= {(method, "last") for method in ("Bidirectional, prompt", "RT-2", "RT-4", "RT-8")}
    controls = {("Bag of input embeddings", "mean")}
    controls |= {("Random weights, Classical", pooling) for pooling in ("mean", "last")}
    assert set(results) == recipes | controls
    assert {key for key, result in results.items() if result.recipe.control} == controls


def test_scores_are_those_of_the_modules(results, backbone_path):
    for name, module in (
        ("Classical", CausalTransformer(backbone_path())),
        ("Echo-3", EchoModule(backbone_path(), repetitions=3)),
        ("ReBA-2", ReBAModule(backbone_path())),
        ("Echo-2, bidirectional", EchoModule(backbone_path(), bidirectional_layers=1)),
    ):
        for pooling, mode in (("mean", "mean"), ("last", "lasttoken")):
            model = pipeline(module, mode)
            first, second = (model.encode(texts, convert_to_tensor=True) for texts in (PAIRS.first, PAIRS.second))
            expected = spearmanr(torch.cosine_similarity(first, second), PAIRS.scores).statistic
            assert results[name, pooling].spearman == pytest.approx(expected)
            words = OddOneOutEvaluator(QUESTIONS)(pipeline(module))["euclidean_accuracy"]
            assert results[name, pooling].odd_one_out == words


def test_cost_is_relative_to_classical(results):
    for (_, pooling), result in results.items():
        assert result.cost == pytest.approx(result.seconds / results["Classical", pooling].seconds)
        assert result.sentences_per_second == pytest.approx(len(PAIRS.texts()) / result.seconds)


def test_without_questions(backbone_path):
    recipes = default_recipes()[-2:]
    found = compare(CausalTransformer(backbone_path()), PAIRS, recipes=recipes)
    assert [result.odd_one_out for result in found] == [None, None]
    assert found[0].cost == 1


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


def test_recipes_without_word_embeddings(results):
    without = {name for (name, _), result in results.items() if result.odd_one_out is None}
    assert without == {"Bidirectional, prompt", "RT-2", "RT-4", "RT-8"}


@pytest.mark.filterwarnings("ignore:.*in its own code")
def test_recipes_that_a_backbone_cannot_run_are_left_out(backbone_path):
    skipped = {}
    found = compare(
        CausalTransformer(backbone_path("bloom")), PAIRS, on_skip=lambda recipe, why: skipped.update({recipe.name: why})
    )
    names = {result.recipe.name for result in found}
    assert {"Classical", "Echo-3", "ReBA-3"} <= names
    assert set(skipped) == {recipe.name for recipe in default_recipes()} - names
    assert "RT-2" in skipped
    assert "cannot be made to attend both ways" in skipped["Bidirectional"]
