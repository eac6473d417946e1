"""Evaluators of pairs: by a trained similarity, and under a condition."""

from __future__ import annotations

import csv

import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import pairwise_cos_sim

from st_reba import (
    BidirectionalLastLayer,
    LayerStates,
    LayerwiseAutoencoder,
)
from st_reba.evaluation import ConditionalSimilarityEvaluator, PairScoreEvaluator

from ..backbones import TEXTS
from ..conftest import pipeline

LABELS = [0.1, 0.9, 0.4, 0.6, 0.3]
CONDITIONS = ["the animal", "the language of the text, at some length", "who", "the animal", "time"]
ROWS = [
    {"sentence1": text, "sentence2": TEXTS[(index + 1) % 5], "condition": condition, "score": score}
    for index, (text, condition, score) in enumerate(zip(TEXTS, CONDITIONS, [1.0, 5.0, 2.0, 3.0, 4.0], strict=True))
]


def test_a_trained_similarity(backbone_path, tmp_path):
    torch.manual_seed(0)
    model = SentenceTransformer(modules=[LayerStates(backbone_path()), LayerwiseAutoencoder(3, 32)], device="cpu")
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


def test_each_pair_is_read_under_its_condition(shared):
    """As when every text is encoded alone, with its condition as the prompt."""
    model = pipeline(BidirectionalLastLayer(shared(), template="csts"), "lasttoken")
    found = ConditionalSimilarityEvaluator.from_rows(ROWS, batch_size=3, name="dev", write_csv=False)(model)
    vectors = [
        torch.stack([
            model.encode(row[side], prompt=f"Given the context {row['condition']}, ", convert_to_tensor=True)
            for row in ROWS
        ])
        for side in ("sentence1", "sentence2")
    ]  # fmt: skip
    cosines = pairwise_cos_sim(*vectors)
    scores = [row["score"] for row in ROWS]
    assert found["dev_spearman_cosine"] == pytest.approx(spearmanr(cosines, scores)[0])
    assert found["dev_pearson_cosine"] == pytest.approx(pearsonr(cosines, scores)[0], abs=1e-4)
    plain = ConditionalSimilarityEvaluator.from_rows(ROWS, worded=lambda text, condition: f"{condition}: {text}")
    assert plain.sentences1[0] == f"the animal: {TEXTS[0]}"
    assert plain.main_similarity.value == "cosine"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: PairScoreEvaluator(TEXTS, TEXTS[1:], LABELS), "5 and 4 texts and 5 labels were given: a pair has one"),
        (lambda: PairScoreEvaluator(TEXTS, TEXTS, [1.0] * 5), "5 pairs with 1 different labels leave nothing to rank"),
        (lambda: ConditionalSimilarityEvaluator(["a"], ["b"], [], [1.0]), r"have \[1, 1, 0, 1\] items: give one of"),
        (
            lambda: ConditionalSimilarityEvaluator(["a", "b"], ["c", "d"], ["e", "f"], [1.0, 1.0]),
            "2 rows with 1 different scores leave nothing to rank",
        ),
        (lambda: ConditionalSimilarityEvaluator.from_rows([]), "0 rows with 0 different scores"),
    ],
)
def test_refusals(made, message):
    with pytest.raises(ValueError, match=message):
        made()


def test_a_model_that_scores_no_pairs(shared):
    with pytest.raises(ValueError, match="The model ends in Pooling, which scores no pairs. Use a model that ends in"):
        PairScoreEvaluator(TEXTS, TEXTS, LABELS)(pipeline(LayerStates(shared())))
