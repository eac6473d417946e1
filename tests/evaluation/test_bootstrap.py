from __future__ import annotations

import math
import re

import numpy as np
import pytest
import scipy.stats
from sklearn.metrics import average_precision_score

from st_reba.evaluation.bootstrap import (
    Estimate,
    Items,
    Splits,
    checked_items,
    difference,
    estimate,
    interval,
    items_to_tell,
    mean,
    partial_spearman,
    pearson,
    spearman,
)

from .. import oracles


def correlated(items, recipes, seed=0, levels=6):
    """Labels on a scale of a few levels, and predictions that get worse from recipe to recipe."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(levels, size=items).astype(float)
    noise = generator.normal(size=(recipes, items))
    return {f"r{row}": labels + (1 + row) * noise[row] for row in range(recipes)}, labels


def drawn(items, resamples, seed):
    """The resamples, read off means of indicators: (resamples, items), how often each is drawn."""
    found = mean({str(i): row for i, row in enumerate(np.eye(items))}).drawn(resamples, seed)
    return np.rint(found * items).astype(int).T


NAIVE = {
    "spearman": lambda values, labels, given: scipy.stats.spearmanr(values, labels)[0],
    "pearson": lambda values, labels, given: scipy.stats.pearsonr(values, labels)[0],
    "partial_spearman": oracles.partial_rank_correlation,
    "average_precision": lambda values, labels, given: average_precision_score(labels > 2, values),
}


@pytest.mark.parametrize("kind", NAIVE)
@pytest.mark.parametrize("ties", [False, True])
def test_every_replicate_is_what_others_give_for_the_resample(kind, ties):
    """SciPy, scikit-learn and, for a partial correlation, residuals."""
    predictions, labels = correlated(60, 3)
    given = labels + np.random.default_rng(7).normal(scale=2, size=60)
    predictions["like the given"] = given + np.random.default_rng(8).normal(scale=0.5, size=60)
    if ties:
        given = np.round(given)
        predictions = {name: np.round(values) for name, values in predictions.items()}
    beside = {"partial_spearman": [labels, given], "average_precision": [labels > 2]}.get(kind, [labels])
    items = checked_items(kind, predictions, *beside)
    expected = [NAIVE[kind](own, labels, given) for own in predictions.values()]
    assert items.scores == pytest.approx(expected, abs=1e-9)
    half = np.arange(0, 60, 2)
    expected = [NAIVE[kind](own[half], labels[half], given[half]) for own in predictions.values()]
    assert items.scored(half[None])[:, 0] == pytest.approx(expected, abs=1e-9)
    replicates = items.drawn(20, 4)
    for column, counts in enumerate(drawn(60, 20, 4)):
        assert counts.sum() == 60
        chosen = np.repeat(np.arange(60), counts)
        expected = [NAIVE[kind](own[chosen], labels[chosen], given[chosen]) for own in predictions.values()]
        assert replicates[:, column] == pytest.approx(expected, abs=1e-9)


def test_what_has_the_order_of_the_given_has_no_partial_correlation():
    given, own = np.random.default_rng(0).normal(size=(2, 30))
    items = partial_spearman({"same": np.exp(given), "flat": 0 * own}, own + given, given)
    assert np.isnan(items.scores).all()


@pytest.mark.parametrize("kind", ["mean", "spearman"])
def test_the_interval_covers_the_truth(kind):
    """150 samples of 100 items: 95% within what a binomial count of them allows, and the bootstrap's own error."""
    generator = np.random.default_rng(3)
    trials, count, rho = 150, 100, 0.6
    truth = 0.3 if kind == "mean" else 6 / math.pi * math.asin(rho / 2)
    covered = 0
    for _ in range(trials):
        if kind == "mean":
            items = mean({"a": generator.random(count) < truth})
        else:
            first, second = generator.multivariate_normal([0, 0], [[1, rho], [rho, 1]], size=count).T
            items = spearman({"a": first}, second)
        low, high = interval(items.drawn(200, 5)[0])
        covered += low <= truth <= high
    assert 0.9 <= covered / trials <= 0.99


def test_differences_are_paired():
    """Two recipes whose intervals overlap widely, but one is better on every item by the same amount."""
    hard = np.random.default_rng(0).normal(scale=5, size=80)
    items = mean({"better": hard + 0.1, "worse": hard, "noise": hard[::-1] + 0.05})
    found = estimate(items)
    assert found["worse"].low < found["better"].value < found["worse"].high
    assert {name for name, own in found.items() if own.tied} == {"better", "noise"}
    assert difference(items, "better", "worse") == pytest.approx((0.1, 0.1))
    low, high = difference(items, "better", "noise")
    assert low < 0.05 < high
    assert difference(items, "noise", "better") == pytest.approx((-high, -low))
    # A control is never tied, however good.
    assert not estimate(items, controls=["better"])["better"].tied


def test_the_same_seed_gives_the_same_and_blocks_do_not_matter(monkeypatch):
    predictions, labels = correlated(50, 3)
    items = spearman(predictions, labels)
    first = items.drawn(70, 1)
    monkeypatch.setattr("st_reba.evaluation.bootstrap._BLOCK", 50 * 9)
    assert np.array_equal(items.drawn(70, 1), first)
    assert not np.array_equal(items.drawn(70, 2), first)


@pytest.mark.parametrize("kind", [spearman, pearson])
def test_what_has_no_score(kind):
    _, labels = correlated(30, 1)
    broken = np.where(np.arange(30) == 3, np.nan, labels)
    found = estimate(kind({"constant": np.full(30, 0.1), "broken": broken, "fine": labels}, labels))
    for own in (found["constant"], found["broken"]):
        assert all(map(math.isnan, (own.value, own.low, own.high)))
        assert not own.tied
    assert found["fine"] == Estimate(pytest.approx(1), pytest.approx(1), pytest.approx(1), True)


def test_resamples_without_a_score_are_dropped():
    """One label that differs: a resample lacks it with probability 1/e."""
    labels = np.r_[1.0, np.zeros(19)]
    items = pearson({"a": np.arange(20.0), "b": np.arange(20.0) ** 2}, labels)
    share = np.isnan(items.replicates).mean()
    assert share == pytest.approx((1 - 1 / 20) ** 20, abs=0.05)
    with pytest.warns(
        UserWarning, match="There is no interval for a, b: too few resamples of the 20 items have a score"
    ):
        found = estimate(items)
    assert all(math.isnan(own.low) and math.isnan(own.high) and own.tied for own in found.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean({}), "Every recipe needs the same items, at least one, but these were given: {}"),
        (lambda: mean({"a": [1], "b": [1, 2]}), "{'a': 1, 'b': 2}"),
        (lambda: spearman({"a": [1, 2]}, [1]), "2 predictions and 1 labels were given: give one label an item"),
        (lambda: pearson({"a": [1, 2]}, [1, np.nan]), "Some labels are not finite"),
        (lambda: estimate(mean({"a": [1]}), controls=["x", "b"]), "controls=['b', 'x'] are none of the recipes ['a']"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_how_many_items_would_tell_a_difference():
    """Of normal differences as large as the measured one, four in five have an interval that leaves out 0."""
    measured = Estimate(0.02, -0.02, 0.06, tied=True)
    needed = items_to_tell(measured, 100)
    half = 0.04 * math.sqrt(100 / needed)
    deviation = half / scipy.stats.norm.ppf(0.975)
    assert scipy.stats.norm.sf(half, loc=0.02, scale=deviation) == pytest.approx(0.8, abs=0.005)
    assert items_to_tell(Estimate(-0.02, -0.06, 0.02), 100) == needed
    assert items_to_tell(Estimate(0.0, -0.1, 0.1), 100) is None
    assert items_to_tell(Estimate(0.1, math.nan, math.nan), 100) is None


def test_splits_are_resampled_one_by_one():
    """A score that is the mean of those of two languages, whatever their sizes."""
    draw = np.random.default_rng(0)
    parts = [mean({"a": draw.normal(size=size)}) for size in (40, 400)]
    both = Splits(parts)
    assert both.scores == pytest.approx(np.mean([part.scores for part in parts], axis=0))
    spread = np.sqrt(sum(part.replicates.var() for part in parts)) / 2
    assert both.replicates.std() == pytest.approx(spread, rel=0.1)


def test_where_nothing_is_to_be_found_there_is_no_average_precision():
    assert np.isnan(Items("average_precision", {"a": [1.0, 2.0]}, [0, 1]).scored(np.array([[0, 0]]))).all()
