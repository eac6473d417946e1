from __future__ import annotations

import math

import pytest
import torch

from st_reba.compare.mteb import mteb_estimates
from st_reba.compare.mteb.run import run_tasks

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
    values = found[name].items.scores
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
