from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from st_reba import CausalTransformer
from st_reba.evaluation import EmbeddingGeometryEvaluator, geometry
from st_reba.evaluation.bootstrap import estimate, mean
from st_reba.evaluation.geometry import alignment, anisotropy, perturb, uniformity

from ..backbones import TEXTS
from ..conftest import pipeline

SENTENCES = [text for text in TEXTS if len(text) > 1]


def cloud(count, seed=0, shift=1.0):
    """Embeddings with a common direction, and of many lengths."""
    return np.random.default_rng(seed).normal(size=(count, 8)) * 3 + shift


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def all_pairs(vectors):
    return [(a, b) for i, a in enumerate(unit(vectors)) for b in unit(vectors)[:i]]


def naive_uniformity(vectors, t=2.0):
    return math.log(np.mean([math.exp(-t * np.sum((a - b) ** 2)) for a, b in all_pairs(vectors)]))


@pytest.mark.parametrize("rows", [4, 1024])
def test_the_equations(rows, monkeypatch):
    monkeypatch.setattr(geometry, "_ROWS", rows)
    first, second = cloud(15), cloud(15, seed=1)
    assert alignment(first, second).mean() == pytest.approx(
        np.mean([np.sum((a - b) ** 2) for a, b in zip(unit(first), unit(second), strict=True)])
    )
    assert uniformity(first).mean() == pytest.approx(naive_uniformity(first))
    assert uniformity(first, t=0.5).mean() == pytest.approx(naive_uniformity(first, t=0.5))
    assert anisotropy(first).mean() == pytest.approx(np.mean([a @ b for a, b in all_pairs(first)]))


def test_the_extremes():
    collapsed, axes = np.ones((5, 3)), np.eye(4)
    assert alignment(collapsed, collapsed).mean() == 0
    assert uniformity(collapsed).mean() == pytest.approx(0)
    assert anisotropy(collapsed).mean() == pytest.approx(1)
    assert alignment(axes, -axes).mean() == pytest.approx(4)
    # Far apart, however much that counts: no rounding of what is near 1.
    assert uniformity(axes, t=300.0).mean() == pytest.approx(-600)
    # A text without tokens has a zero vector: at distance 1 from all others.
    vectors = np.r_[np.zeros((1, 4)), axes]
    pairs = [np.sum((vectors[i] - vectors[j]) ** 2) for i in range(5) for j in range(i)]
    assert uniformity(vectors).mean() == pytest.approx(math.log(np.mean(np.exp(-2 * np.array(pairs)))))
    assert anisotropy(vectors).mean() == pytest.approx(0)


@pytest.mark.parametrize("metric", [uniformity, anisotropy])
def test_shares_vary_as_the_metric_does(metric):
    """The bootstrap's spread against that of the metric over many samples: pairs are not independent items."""
    values = [metric(cloud(60, seed)).mean() for seed in range(300)]
    widths = []
    for seed in range(20):
        found = estimate(mean({"a": metric(cloud(60, seed))}), resamples=300)["a"]
        widths.append(found.high - found.low)
    assert np.mean(widths) / (2 * 1.96) == pytest.approx(np.std(values), rel=0.15)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the quick brown fox", "the quick fox"),
        ("我爱自然语言处理。", "我爱自然言处理。"),
        ("两 words 和 three，more", "两 words three，more"),
        ("word", "wod"),
        (" 好吗 ", "好"),
        ("a b c d e f g h i j k l m n o p q r s t u", "a b c e f g h i j l m n o p q s t u"),
        ("カタカナ and 𠀀𠀁", "カタカ and 𠀀𠀁"),
    ],
)
def test_perturbations(text, expected):
    assert perturb(text) == perturb(text) == expected


def test_evaluating(backbone_path, tmp_path):
    model = pipeline(CausalTransformer(backbone_path()))
    texts = [*SENTENCES, SENTENCES[0], "a", ""]
    evaluator = EmbeddingGeometryEvaluator(texts, name="own", batch_size=2)
    assert evaluator.texts == SENTENCES
    assert evaluator.pairs == math.comb(len(SENTENCES), 2)
    metrics = evaluator(model, output_path=str(tmp_path), epoch=0, steps=3)
    embeddings, positives = model.encode(SENTENCES), model.encode([perturb(text) for text in SENTENCES])
    assert set(metrics) == {f"own_{name}" for name in ("contrastive_loss", "alignment", "uniformity", "anisotropy")}
    assert metrics["own_alignment"] == pytest.approx(alignment(embeddings, positives).mean(), abs=1e-5)
    assert metrics["own_uniformity"] == pytest.approx(naive_uniformity(embeddings), abs=1e-5)
    assert metrics[evaluator.primary_metric] == pytest.approx(2 * metrics["own_alignment"] + metrics["own_uniformity"])
    assert not evaluator.greater_is_better
    assert {f"own_{name}": value for name, value in evaluator.score(embeddings, positives).items()} == pytest.approx(
        metrics, abs=1e-5
    )
    with (tmp_path / "embedding_geometry_own_results.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["anisotropy"]) == metrics["own_anisotropy"]
    assert row["steps"] == "3"
    assert evaluator.get_config_dict() == {"t": 2.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: EmbeddingGeometryEvaluator(["ab", "cd", "e", "ab"]),
            "needs 3 different texts of two characters or more, but 2 of the 4 given are",
        ),
        (lambda: EmbeddingGeometryEvaluator(SENTENCES, t=0), "t=0: give a number greater than 0; 2 is usual"),
        (lambda: EmbeddingGeometryEvaluator(SENTENCES, t=math.nan), "t=nan"),
        (
            lambda: EmbeddingGeometryEvaluator(SENTENCES).score(cloud(len(SENTENCES)), cloud(2)),
            rf"\({len(SENTENCES)}, D\) embeddings are scored, not \(2, 8\)",
        ),
        (lambda: uniformity(cloud(4) * np.nan), "Some embeddings are not finite"),
        (lambda: perturb(" 好 "), "fewer than two characters, so nothing can be left out"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
