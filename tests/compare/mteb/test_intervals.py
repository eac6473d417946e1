from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from st_reba.compare.mteb.intervals import mteb_estimates, score_statistic
from st_reba.compare.mteb.run import run_tasks
from st_reba.compare.mteb.samples import Sample

pytest.importorskip("mteb")

from . import demo

VARIANTS = ["good", "poor"]


def embed(texts, prompt):
    """Counts of characters, and of few of them: mteb's task is what matters here."""
    buckets = torch.zeros(len(texts), 64)
    for row, text in enumerate(texts):
        for character in text:
            buckets[row, ord(character) % 64] += 1
    return {"good": buckets + 0.01, "poor": buckets[:, :24] + 0.01}


@pytest.fixture(scope="module")
def found():
    tasks = [task() for task in demo.TASKS]
    return {scores.task.name: scores for scores in run_tasks(tasks, VARIANTS, embed, model="m", revision="1")}


UNITS = {
    "DemoSTS": ["pair"] * 4,
    "DemoPairs": ["pair"],
    "DemoPairsInOneRow": ["pair"],
    "DemoClassification": ["text"],
    "DemoClassificationF1": ["experiment"],
    "DemoClustering": ["clustering"],
    "DemoClusteringSets": ["clustering"],
    "DemoRetrieval": ["query"],
    "DemoReranking": ["query"],
}


@pytest.mark.parametrize("name", UNITS)
def test_the_samples_make_up_the_score(name, found):
    scores = found[name].scores
    for score in scores.values():
        assert [sample.unit for sample in score.samples] == UNITS[name]
    values = score_statistic({variant: score.samples for variant, score in scores.items()}).values()
    # mteb rounds the scores of retrieval to five digits.
    assert values == pytest.approx([score.value for score in scores.values()], abs=1e-5)


@pytest.mark.parametrize("name", UNITS)
def test_intervals_hold_the_value(name, found):
    estimates = mteb_estimates(found[name], resamples=200)
    for variant, estimate in estimates.items():
        assert estimate.value == found[name].scores[variant].value
        assert estimate.low <= estimate.value + 0.02
        assert estimate.high >= estimate.value - 0.02
        assert estimate.low < estimate.high or estimate.value == 1
    best = max(estimates.values(), key=lambda estimate: estimate.value)
    assert best.tied


def test_controls_are_never_tied(found):
    assert not mteb_estimates(found["DemoSTS"], controls=["good"], resamples=50)["good"].tied


def test_nothing_to_resample():
    (scores,) = run_tasks([demo.DemoAll()], VARIANTS, embed, model="m", revision="1")
    estimates = mteb_estimates(scores)
    assert all(math.isnan(estimate.low) and math.isnan(estimate.high) for estimate in estimates.values())
    assert [estimate.tied for estimate in estimates.values()].count(True) == 1
    best = max(estimates, key=lambda variant: estimates[variant].value)
    assert estimates[best].tied


def naive_accuracy(labels, values):
    thresholds = sorted(set(values))[1:]
    return max((fmean((values >= threshold) == labels) for threshold in thresholds), default=0.0)


@pytest.mark.parametrize(
    ("statistic", "naive"), [("best_accuracy", naive_accuracy), ("average_precision", average_precision_score)]
)
def test_pair_statistics_of_resamples(statistic, naive):
    draw = np.random.default_rng(0)
    labels = draw.integers(2, size=30)
    values = {"a": draw.normal(size=(30, 2)), "b": np.round(draw.normal(size=(30, 1)), 1)}
    samples = {name: [Sample("test", "default", "pair", statistic, own, labels)] for name, own in values.items()}
    counts = draw.multinomial(30, [1 / 30] * 30, size=20).T.astype(float)
    scores = score_statistic(samples).of_counts(counts)
    assert scores.shape == (2, 20)
    for column, resample in enumerate(counts.T):
        rows = np.repeat(np.arange(30), resample.astype(int))
        for name, own, row in zip(values, values.values(), scores, strict=True):
            expected = max(naive(labels[rows], similarity[rows]) for similarity in own.T)
            assert row[column] == pytest.approx(expected), name


def test_a_split_that_is_not_drawn_has_no_score():
    draw = np.random.default_rng(0)
    samples = [
        Sample(split, "default", "query", "mean", draw.normal(size=size)) for split, size in (("a", 2), ("b", 5))
    ]
    statistic = score_statistic({"only": samples})
    counts = np.ones((7, 3))
    counts[:2, 1] = 0
    counts[:2, 2] = 4
    plain, missing, more = statistic.of_counts(counts)[0]
    assert plain == more == pytest.approx(fmean(sample.values.mean() for sample in samples))
    assert math.isnan(missing)
