from __future__ import annotations

import csv

import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sentence_transformers import SentenceTransformer

from st_reba import LayerStates, LayerwiseAutoencoder
from st_reba.evaluation import PairScoreEvaluator

from ..backbones import TEXTS
from ..conftest import pipeline

LABELS = [0.1, 0.9, 0.4, 0.6, 0.3]


@pytest.fixture(scope="module")
def model(backbone_path):
    torch.manual_seed(0)
    return SentenceTransformer(modules=[LayerStates(backbone_path()), LayerwiseAutoencoder(3, 32)], device="cpu")


def test_correlations(model, tmp_path):
    evaluator = PairScoreEvaluator(TEXTS, TEXTS[::-1], LABELS, name="dev")
    metrics = evaluator(model, str(tmp_path), epoch=1, steps=7)
    first, second = (model.encode(texts, convert_to_tensor=True) for texts in (TEXTS, TEXTS[::-1]))
    for kind, values in (
        ("score", model[-1].score_pairs(first, second)),
        ("cosine", model.similarity_pairwise(first, second)),
    ):
        assert metrics[f"dev_pearson_{kind}"] == pytest.approx(pearsonr(values, LABELS).statistic, abs=1e-5)
        assert metrics[f"dev_spearman_{kind}"] == pytest.approx(spearmanr(values, LABELS).statistic, abs=1e-5)
    assert evaluator.primary_metric == "dev_pearson_score"
    (row,) = csv.DictReader((tmp_path / "pair_scores_dev_results.csv").open())
    assert float(row["pearson_score"]) == metrics["dev_pearson_score"]
    assert row["steps"] == "7"


def test_refusals(shared):
    with pytest.raises(ValueError, match="5 and 4 texts and 5 labels were given: a pair has one of each"):
        PairScoreEvaluator(TEXTS, TEXTS[1:], LABELS)
    with pytest.raises(ValueError, match="5 pairs with 1 different labels leave nothing to rank"):
        PairScoreEvaluator(TEXTS, TEXTS, [1.0] * 5)
    with pytest.raises(ValueError, match="The model ends in Pooling, which scores no pairs. Use a model that ends in"):
        PairScoreEvaluator(TEXTS, TEXTS, LABELS)(pipeline(LayerStates(shared())))
