from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from st_reba import CausalTransformer
from st_reba.compare.columns import embed, geometry_columns, task_columns, word_sense_column
from st_reba.compare.runner import Recipes
from st_reba.compare.tf_idf import TfIdf
from st_reba.data.demo import DEMO_PAIRS, DEMO_QUESTIONS, demo_sentences
from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation import EmbeddingGeometryEvaluator, OddOneOutEvaluator
from st_reba.evaluation.store import EmbeddingStore
from st_reba.evaluation.tasks import task_of
from st_reba.recipes import default_recipes

from .. import oracles


@pytest.fixture(scope="module")
def recipes(shallow_path):
    every = default_recipes(2, [text[:16] for text in demo_sentences("en")[:40]])
    chosen = [recipe for recipe in every if recipe.name in ("Classical", "Classical, whitened", "ReBA-2", "RT-2")]
    return Recipes(CausalTransformer(shallow_path), chosen)


@contextmanager
def embedded(recipes, texts, words=None):
    with EmbeddingStore(recipes.embed) as store:
        found = embed(recipes, [(None, texts)], words, store)
        store.embed = None  # From here on there is nothing but looking up.
        yield found


def overlap_of(recipes, pairs, texts=None):
    return TfIdf(recipes.backbone, pairs.texts() if texts is None else texts)


@pytest.fixture(scope="module")
def pairs():
    demo = read_pairs(DEMO_PAIRS)
    first, second = ([text[:24] for text in side[:24]] for side in (demo.first, demo.second))
    return Pairs(first, second, demo.scores[:24])


def test_pairs_are_scored_as_sts_evaluator_does(recipes, pairs):
    with embedded(recipes, pairs.texts()) as found:
        spearman, _, pearson = task_columns(found, task_of(pairs), overlap_of(recipes, pairs))
    assert (spearman.task.name, pearson.task.name) == ("STS", "STS, Pearson")
    evaluator = EmbeddingSimilarityEvaluator(pairs.first, pairs.second, pairs.scores, main_similarity="cosine")
    for recipe in recipes.all:
        if not recipe.control:
            model = recipe.model(recipes.backbone)
            found = evaluator(model)
            assert spearman.estimates[recipe.result].value == pytest.approx(found["spearman_cosine"], abs=1e-6)
            assert pearson.estimates[recipe.result].value == pytest.approx(found["pearson_cosine"], abs=1e-6)
            first, second = (model.encode(texts, convert_to_tensor=True) for texts in (pairs.first, pairs.second))
            cosine = torch.cosine_similarity(first, second)
            assert found["spearman_cosine"] == pytest.approx(spearmanr(cosine, pairs.scores).statistic, abs=1e-6)
            assert found["pearson_cosine"] == pytest.approx(pearsonr(cosine, pairs.scores).statistic, abs=1e-6)


def test_the_interval_is_about_the_value(recipes, pairs):
    """The statistic that is resampled is the score that the evaluator gave."""
    with embedded(recipes, pairs.texts()) as looked_up:
        columns = task_columns(looked_up, task_of(pairs), overlap_of(recipes, pairs))
    for column in columns:
        values = dict(zip(column.statistic.recipes, column.statistic.values(), strict=True))
        for key, found in column.estimates.items():
            assert values[key] == pytest.approx(found.value, abs=1e-5)
            assert found.low < found.value < found.high
        assert not any(column.estimates[key].tied for key in recipes.controls)


@pytest.mark.parametrize("fit_texts", [None, ["one text", "another text", "一句话"]])
def test_overlap_and_what_is_beyond_it(recipes, pairs, fit_texts):
    with embedded(recipes, pairs.texts()) as found:
        spearman, beyond, pearson = task_columns(found, task_of(pairs), overlap_of(recipes, pairs, fit_texts))
    counted = pairs.texts() if fit_texts is None else fit_texts
    overlap = TfIdf(recipes.backbone, counted).cosines(pairs.first, pairs.second)
    assert spearman.estimates["tf-idf, mean"].value == pytest.approx(spearmanr(overlap, pairs.scores).statistic)
    assert pearson.estimates["tf-idf, mean"].value == pytest.approx(pearsonr(overlap, pairs.scores).statistic)
    assert not spearman.estimates["tf-idf, mean"].tied
    assert beyond.task.name == "Beyond overlap"
    assert f"counted on {len(counted)} texts" in beyond.task.note
    assert set(beyond.estimates) == {recipe.result for recipe in recipes.all}
    model = next(recipe for recipe in recipes.all if recipe.result == "Classical, mean").model(recipes.backbone)
    vectors = [model.encode(texts, convert_to_tensor=True) for texts in (pairs.first, pairs.second)]
    expected = oracles.partial_rank_correlation(torch.cosine_similarity(*vectors), pairs.scores, overlap)
    assert beyond.estimates["Classical, mean"].value == pytest.approx(expected, abs=1e-6)


def test_word_sense(recipes):
    questions = OddOneOutEvaluator.from_csv(DEMO_QUESTIONS).questions[:4]
    with embedded(recipes, [], OddOneOutEvaluator(questions)) as found:
        column = word_sense_column(found, OddOneOutEvaluator(questions))
    assert column.task.chance == 0.25
    assert not any("RT-2" in key for key in column.estimates)
    for recipe in recipes.all:
        if recipe.words and not recipe.random:
            model = recipe.model(recipes.backbone)
            if getattr(model[0], "rows", "all") == "all":
                alone = OddOneOutEvaluator(questions)(model)["euclidean_accuracy"]
                assert column.estimates[recipe.result].value == pytest.approx(alone)
    assert column.estimates["ReBA-2, mean"] == column.estimates["ReBA-2, last"]


def test_without_labels(recipes, pairs):
    evaluator = EmbeddingGeometryEvaluator(pairs.texts())
    with embedded(recipes, [*evaluator.texts, *evaluator.positives]) as found:
        columns = geometry_columns(found, evaluator)
    assert [column.task.name for column in columns] == ["Contrastive loss", "Alignment", "Uniformity", "Anisotropy"]
    assert all(column.task.proxy and not column.task.greater_is_better for column in columns)
    model = next(recipe for recipe in recipes.all if recipe.result == "ReBA-2, mean").model(recipes.backbone)
    alone = evaluator(model)
    for column, metric in zip(columns, ("contrastive_loss", "alignment", "uniformity", "anisotropy"), strict=True):
        assert column.estimates["ReBA-2, mean"].value == pytest.approx(alone[metric], abs=1e-5)
