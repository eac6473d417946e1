from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from st_reba.compare.against import side_by_side
from st_reba.compare.results import Comparison, Result, SavedItems
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure

TASK = Measure("STS", "accuracy x 100", unit="labelled pairs")


def comparison(
    right: dict[str, float], seed: int = 0, items: int = 400, data: str = "the data", hard=None
) -> Comparison:
    """Recipes that get such shares of the items right."""
    draw = np.random.default_rng(seed)
    hard = draw.random(items) if hard is None else hard
    values = {
        f"{name}, mean": (hard + 0.05 * draw.standard_normal(items) < share) * 1.0 for name, share in right.items()
    }
    found = bootstrap.estimate(bootstrap.mean(values))
    results = [Result(name, "mean", False, {"STS": found[f"{name}, mean"]}) for name in right]
    saved = SavedItems.of(bootstrap.mean(values), data)
    return Comparison("model", "pairs", [TASK], results, items=saved, use="A, mean")


HARD = np.random.default_rng(9).random(400)


def test_paired_differences_see_what_others_do_not():
    old = comparison({"A": 0.5, "B": 0.6}, 1, hard=HARD)
    new = comparison({"A": 0.55, "B": 0.6, "C": 0.9}, 2, hard=HARD)
    paired = side_by_side(new, old)
    assert paired.paired
    assert [change.name for change in paired.changes] == ["A, mean", "B, mean"]
    first, second = (change.difference for change in paired.changes)
    assert 0 < first.low < first.value < first.high
    assert not first.tied
    assert second.tied
    assert paired.says[0].startswith("1 of 2 results changed beyond the interval, most of all A, mean by +")
    assert paired.says[1:] == [
        "The intervals are paired: both comparisons are of the same labelled pairs.",
        "To use: A, mean, as before.",
    ]
    apart = side_by_side(new, dataclasses.replace(old, items=dataclasses.replace(old.items, data="others")))
    assert not apart.paired
    # The same difference, much less sure: the items are no longer the same.
    assert apart.changes[0].difference.value == first.value
    assert apart.changes[0].difference.tied
    assert apart.says[0].startswith("Nothing changed beyond the interval, of 2 results; most of all A, mean by +")
    assert apart.says[1].startswith("The intervals are not paired: the labelled pairs are others")


def test_intervals_of_two_samples():
    """The halves of both intervals, each on its side, add up by their squares."""
    old, new = comparison({"A": 0.5}, 1), comparison({"A": 0.6}, 2)
    old, new = (dataclasses.replace(each, items=None) for each in (old, new))
    (change,) = side_by_side(new, old).changes
    low = math.hypot(change.new.value - change.new.low, change.old.high - change.old.value)
    assert change.difference.value - change.difference.low == pytest.approx(low)
    # Near that of two means that have nothing to do with each other.
    deviation = math.sqrt(2 * 0.25 / 400)
    assert change.difference.high - change.difference.low == pytest.approx(2 * 1.96 * deviation, rel=0.1)
    assert "what each item gave was not kept" in side_by_side(new, old).says[1]


def test_correlations_are_paired_too():
    labels = list(np.random.default_rng(1).random(300))
    near = np.array(labels) + 0.3 * np.random.default_rng(2).standard_normal(300)

    def of(values):
        items = SavedItems.of(bootstrap.spearman({"A, mean": values}, labels), "d")
        found = bootstrap.estimate(items.items())
        return Comparison("m", "d", [TASK], [Result("A", "mean", False, {"STS": found["A, mean"]})], items=items)

    (change,) = side_by_side(of(near), of(near + 0.001)).changes
    assert (change.difference.low, change.difference.high) == (0, 0)
    assert change.difference.tied
    assert not side_by_side(of(near), of(-near)).changes[0].difference.tied


def test_without_intervals_nothing_is_told():
    nan = float("nan")
    one, other = (
        Comparison("m", "d", [TASK], [Result("A", "mean", False, {"STS": Estimate(value, nan, nan)})])
        for value in (0.2, 0.9)
    )
    assert side_by_side(one, other).changes[0].difference.tied


def test_another_answer():
    new, old = comparison({"A": 0.5}), dataclasses.replace(comparison({"A": 0.5}), use="")
    assert side_by_side(new, old).says[-1] == "To use: A, mean; before: none."


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (comparison({"Z": 0.5}), "have no recipe in common: the old one has Z, mean."),
        (
            dataclasses.replace(comparison({"A": 0.5}), tasks=[Measure("NLI", "accuracy x 100")]),
            r"by STS \(accuracy x 100\), the old one by NLI \(accuracy x 100\): compare on the same kind of data",
        ),
    ],
)
def test_what_cannot_be_held_against_each_other(old, message):
    with pytest.raises(ValueError, match=message):
        side_by_side(comparison({"A": 0.5}), old)
