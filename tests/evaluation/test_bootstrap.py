"""Weighted scores are those of repeated items; intervals cover, and statements about many rows are rarely wrong."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from st_reba.evaluation import bootstrap

ORACLES = {
    "mean": lambda values, labels: values.mean(),
    "spearman": lambda values, labels: scipy.stats.spearmanr(values, labels)[0],
    "pearson": lambda values, labels: scipy.stats.pearsonr(values, labels)[0],
    "average_precision": lambda values, labels: average_precision_score(labels, values),
}


def labels_of(kind, draw, count):
    return draw.integers(2 if kind == "average_precision" else 5, size=count).astype(float)


@pytest.mark.parametrize("kind", ORACLES)
@settings(deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(4, 40), levels=st.integers(2, 50))
def test_weighted_scores_are_those_of_repeated_items(kind, seed, count, levels):
    """By SciPy and scikit-learn, with ties or without; undefined where theirs are."""
    draw = np.random.default_rng(seed)
    labels, values = labels_of(kind, draw, count), draw.integers(levels, size=(3, count)) / 7
    weights = draw.integers(4, size=(5, count)).astype(float)
    weights[weights.sum(axis=1) < 2] = 1
    found = bootstrap.scorer(kind, weights, labels)(values)
    for row, own in enumerate(values):
        for column, times in enumerate(weights.astype(int)):
            repeated = np.repeat(own, times), np.repeat(labels, times)
            flat = kind in ("spearman", "pearson") and min(map(np.ptp, repeated)) == 0
            if flat or (kind == "average_precision" and not repeated[1].any()):
                assert np.isnan(found[row, column])
            else:
                assert found[row, column] == pytest.approx(ORACLES[kind](*repeated), abs=1e-9)


@pytest.mark.parametrize("kind", ["spearman", "average_precision"])
def test_replicates_of_many_items_are_linear_in_influence(kind, monkeypatch):
    """Exact on all items, and on a replicate nearly what it is there."""
    draw = np.random.default_rng(0)
    labels = labels_of(kind, draw, 1500)
    values = np.round(labels + draw.normal(size=(2, 1500)), 1)
    weights = bootstrap.draw_weights(np.arange(1500), 100)
    exact = bootstrap.scorer(kind, weights, labels)(values)
    monkeypatch.setattr(bootstrap, "EXACT", 1000)
    linear = bootstrap.scorer(kind, weights, labels)(values)
    assert linear[:, 0] == pytest.approx(exact[:, 0], abs=1e-9)
    assert np.abs(linear - exact).mean() < 0.1 * exact.std()


def test_groups_are_drawn_as_a_whole():
    weights = bootstrap.draw_weights(np.array([0, 1, 0, 2, 2]), 50)
    assert weights.shape == (51, 5)
    assert (weights[0] == 1).all()
    assert (weights[:, 0] == weights[:, 2]).all()
    assert (weights[:, 3] == weights[:, 4]).all()
    assert (weights[:, [0, 1, 3]].sum(axis=1) == 3).all()


@pytest.mark.parametrize("kind", ["spearman", "average_precision"])
def test_the_interval_of_the_best_of_many_covers_its_truth(kind):
    """Ten equal rows, 100 samples of 100 items: the plain score is too high, the corrected one by much less."""
    draw, covered, above, plain = np.random.default_rng(1), 0, [], []
    # 10,000 items say what ten equal rows are worth.
    labels = labels_of(kind, draw, 10_000)
    exact = bootstrap.scorer(kind, np.ones((1, 10_000)), labels)
    truth = float(exact(labels + 2 * draw.normal(size=(1, 10_000)))[0, 0])
    for _ in range(100):
        labels = labels_of(kind, draw, 100)
        values = {f"row {row}": labels + 2 * draw.normal(size=100) for row in range(10)}
        items = bootstrap.checked_items(kind, values, labels)
        scores = dict(zip(items.values, items.scores, strict=True))
        drawn = dict(zip(items.values, items.replicates, strict=True))
        found = bootstrap.Replicated(scores, drawn, kind, 100)
        best = found.estimates()[found.best]
        covered += best.low <= truth <= best.high
        above.append(best.best_guess - truth)
        plain.append(best.value - truth)
    assert covered >= 93
    assert abs(np.mean(above)) < 0.5 * np.mean(plain)


def test_items_that_are_all_right_have_an_interval():
    """As wide as the exact binomial interval of the best of ten: nobody knows of the next items."""
    for count in (40, 60, 200, 1000):
        right = bootstrap.estimate(bootstrap.mean({"all": np.ones(count), "one wrong": np.arange(count) > 0}))
        assert right["all"].high == 1
        assert 0.025 ** (1 / count) > right["all"].low == pytest.approx(0.0025 ** (1 / count), rel=0.01)
        assert right["one wrong"].low < 1 - 1 / count < right["one wrong"].high


def test_equal_rows_are_rarely_told_apart():
    """From one of their own, and from the best; a row that is better on every item always is."""
    draw, ahead, apart = np.random.default_rng(2), 0, 0
    for _ in range(150):
        values = draw.normal(size=(11, 60))
        items = bootstrap.mean({f"row {row}": own for row, own in enumerate(values)} | {"better": values[0] + 3})
        scores = dict(zip(items.values, items.scores, strict=True))
        drawn = dict(zip(items.values, items.replicates, strict=True))
        equal = bootstrap.Replicated(scores, drawn, own=[f"row {row}" for row in range(1, 11)])
        ahead += equal.ahead(equal.best, "row 0")
        apart += not all(map(equal.tied, (f"row {row}" for row in range(1, 11))))
        every = bootstrap.Replicated(scores, drawn)
        assert every.best == "better"
        assert every.ahead("better", "row 0")
        assert not every.tied("row 0")
        assert every.within("row 0", 9)
        assert not every.within("row 0", 2)
    assert ahead <= 0.06 * 150
    assert apart <= 0.08 * 150


def test_without_enough_replicates_nothing_is_sure():
    scores, drawn = {"a": 0.5, "b": 0.1, "none": math.nan}, np.random.default_rng(0).normal(size=(3, 100))
    rows = dict(zip(scores, drawn, strict=True))
    rows["b"][:11] = math.nan
    found = bootstrap.Replicated(scores, rows)
    assert (found.names, found.best, found.sure) == (["a", "b"], "a", False)
    assert np.isnan(bootstrap.half_widths(np.stack([rows["a"], rows["b"]]))).all()
    assert not found.ahead("a", "b")
    assert found.tied("b")
    assert all(math.isnan(own.low) and own.corrected is None for own in found.estimates().values())
    # A control takes no intervals but its own.
    found = bootstrap.Replicated(scores, rows, own={"a"})
    assert (found.names, found.sure) == (["a"], True)


def test_what_is_ahead_is_ahead_by_its_corrected_score():
    """The first row is a bit better than ``plain`` on all items, and one of many that are about as good."""
    noise = np.random.default_rng(0).normal(0, 0.05, (20, 400))
    scores = {str(row): 0.53 - 0.001 * (row > 0) for row in range(20)} | {"plain": 0.5}
    drawn = {str(row): scores[str(row)] + own for row, own in enumerate(noise)} | {"plain": 0.5 + noise[0]}
    found = bootstrap.Replicated(scores, drawn, own=scores.keys() - {"plain"})
    assert (found.best, found.least("0", "plain")) == ("0", pytest.approx(0))
    assert found.estimates()["0"].corrected < scores["plain"]
    assert not found.ahead("0", "plain")


def test_differences_are_paired():
    """Rows whose intervals overlap widely; one is better on every item by the same amount."""
    hard = np.random.default_rng(0).normal(scale=5, size=80)
    items = bootstrap.mean({"better": hard + 0.1, "worse": hard, "noise": hard[::-1] + 0.05})
    found = bootstrap.estimate(items)
    assert found["worse"].low < found["better"].value < found["worse"].high
    assert {name for name, own in found.items() if own.tied} == {"better", "noise"}
    # A control is never tied, however good.
    assert not bootstrap.estimate(items, controls=["better"])["better"].tied


@pytest.mark.parametrize("kind", [bootstrap.spearman, bootstrap.pearson])
def test_what_has_no_score(kind):
    labels = np.random.default_rng(0).integers(6, size=30).astype(float)
    broken = np.where(np.arange(30) == 3, np.nan, labels)
    found = bootstrap.estimate(kind({"constant": np.full(30, 0.1), "broken": broken, "fine": labels}, labels))
    for own in (found["constant"], found["broken"]):
        assert all(map(math.isnan, (own.value, own.low, own.high)))
        assert not own.tied
    assert found["fine"].value == pytest.approx(1)
    with pytest.warns(UserWarning, match="There is no interval for a: too few replicates of the 20 items have a score"):
        bootstrap.estimate(bootstrap.pearson({"a": np.arange(20.0)}, np.r_[1.0, np.zeros(19)]))


REFUSALS = [
    (lambda: bootstrap.mean({}), "Every recipe needs the same items, at least one, but these were given: {}"),
    (lambda: bootstrap.mean({"a": [1], "b": [1, 2]}), "{'a': 1, 'b': 2}"),
    (lambda: bootstrap.spearman({"a": [1, 2]}, [1]), "2 predictions and 1 labels were given: give one label an item"),
    (lambda: bootstrap.pearson({"a": [1, 2]}, [1, np.nan]), "Some labels are not finite"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
