"""How sure a score is: bootstrap intervals, and which recipes cannot be told from the best.

A little longer than other files, because each statistic stands beside the counting that it is made from.

Every statistic here is a function of *counts*, how often each of N items (sentence pairs, questions, texts) stands in a
resample. All recipes of a table see the same resamples, so that differences between them are paired: what makes an item
hard makes it hard for all, and the difference of two recipes is surer than either score.

Intervals are percentile intervals. BCa would be second-order accurate, but wants a leave-one-out pass over the items
for each recipe and difference, and breaks down where accuracies are near 0 or 1, or many replicates equal the value, as
those of small question sets do. From some fifty items on, percentile intervals of correlations and means are close to
it; with fewer they are somewhat too narrow, and where every item is answered right they have no width at all. An
interval says how much the score would vary with other items of the same kind. It knows nothing of other kinds of text,
nor of items that depend on one another.

Many recipes are compared with the best at once, and the best was chosen on the same items. No correction is made: of
twenty recipes that are all equally good, about four will by chance not be tied with the best, and the best one's value
is too high. "Tied" can be relied on; "not tied" by a little is a hint to confirm on other data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

RESAMPLES = 1000

# Fewer proper replicates than this share of all say nothing about the rest.
_LEAST_PROPER = 0.9

# Items times resamples at a time: what the caches of a CPU hold.
_BLOCK = 100_000


@dataclass(frozen=True)
class Estimate:
    """One score and how sure it is.

    Attributes:
        value: As measured on all the data, in the metric's own unit (a correlation, an accuracy).
        low: Lower end of the 95% bootstrap interval.
        high: Upper end of it; both NaN where nothing can be resampled.
        tied: Whether it cannot be told from the best recipe's score on this data: the 95% interval of the paired
            difference holds 0. The best itself is tied; a control never is.
    """

    value: float
    low: float
    high: float
    tied: bool = False


#: What a score is of values that can be written down: a function of this module.
Kind = Literal["mean", "spearman", "average_precision"]


@dataclass(frozen=True)
class MadeFrom:
    """What a score is made from, as it can be written down and paired with another's.

    Attributes:
        kind: Which function of this module makes it.
        rows: What each recipe gives for each item, (M, N).
        labels: (N,); None where there are none.
    """

    kind: Kind
    rows: Array
    labels: Array | None = None


@dataclass(frozen=True)
class Statistic:
    """A score of each recipe as a function of which items are drawn: made by :func:`mean`, :func:`spearman`,
    :func:`pearson`, :func:`partial_spearman` or :func:`average_precision`.

    Attributes:
        recipes: M names.
        items: N, how many items there are.
        of_counts: From (N, R) counts, each column of which sums to N, to (M, R) scores; NaN where a resample has none.
        made_from: All that it is made from; None where that is more than each recipe's items and labels.
    """

    recipes: list[str]
    items: int
    of_counts: Callable[[Array], Array]
    made_from: MadeFrom | None = None

    def values(self) -> Array:
        """(M,): the scores on all items."""
        return self.of_counts(np.ones((self.items, 1)))[:, 0]

    @cached_property
    def replicates(self) -> Array:
        """(M, R): what :func:`bootstrap` gives by default, drawn once, however many differences are asked for."""
        return _drawn(self, RESAMPLES, 0)


def estimate(
    statistic: Statistic,
    *,
    controls: Collection[str] = (),
    greater_is_better: bool = True,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Each recipe's score with its 95% interval, and whether it is tied with the best.

    The best is the recipe, not a control, with the best score on all items; the earliest of equals. A recipe is tied
    with it if the 95% interval of their paired difference holds 0, or cannot be had. Where more than a tenth of the
    resamples have no score (all labels alike, in a correlation), an interval is NaN, with one warning.

    Args:
        statistic: The scores.
        controls: Those of its recipes that are there to be beaten: never the best, never tied.
        greater_is_better: Which way is up.
        resamples: How many.
        seed: Of the generator: the same seed and number of items give the same resamples.

    Returns:
        One estimate for each recipe.

    Raises:
        ValueError: If a control is none of the recipes, or ``resamples`` is less than 1.
    """
    if unknown := sorted(set(controls) - set(statistic.recipes)):
        raise ValueError(f"controls={unknown} are none of the recipes {statistic.recipes}.")
    values = statistic.values()
    replicates = bootstrap(statistic, resamples=resamples, seed=seed)
    lows, highs = interval(replicates)
    if without := [name for name, low, value in zip(statistic.recipes, lows, values, strict=True)
                   if np.isnan(low) and not np.isnan(value)]:  # fmt: skip
        warnings.warn(
            f"There is no interval for {', '.join(without)}: too few resamples of the {statistic.items} items have a "
            "score. More items are needed, or more that differ.",
            stacklevel=2,
        )
    tied = _tied(statistic, values, replicates, controls, greater_is_better)
    return {
        name: Estimate(float(value), float(low), float(high), bool(is_tied))
        for name, value, low, high, is_tied in zip(statistic.recipes, values, lows, highs, tied, strict=True)
    }


def bootstrap(statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """The score of each recipe on each of many resamples of the items, the same for all recipes.

    Args:
        statistic: The scores.
        resamples: R, how many.
        seed: Of the generator.

    Returns:
        (M, R); NaN where a resample has no score, and throughout if there is only one item.

    Raises:
        ValueError: If ``resamples`` is less than 1.
    """
    if resamples < 1:
        raise ValueError(f"resamples={resamples}: give the number of resamples, 1 or more; {RESAMPLES} is usual.")
    return statistic.replicates if (resamples, seed) == (RESAMPLES, 0) else _drawn(statistic, resamples, seed)


def _drawn(statistic: Statistic, resamples: int, seed: int) -> Array:
    if statistic.items < 2:
        return np.full((len(statistic.recipes), resamples), np.nan)
    return np.concatenate([statistic.of_counts(counts) for counts in _counts(statistic.items, resamples, seed)], axis=1)


def interval(replicates: Array, level: float = 0.95) -> tuple[Array, Array]:
    """Percentile intervals of (..., R) replicates: the lower and upper ends, (...).

    Replicates that are NaN are left out; both ends are NaN where these are more than a tenth.
    """
    proper = ~np.isnan(replicates)
    enough = proper.mean(axis=-1) >= _LEAST_PROPER
    # Rows without any would warn; what stands in for them is not kept.
    kept = np.where(enough[..., None], replicates, 0.0)
    low, high = np.nanquantile(kept, [(1 - level) / 2, (1 + level) / 2], axis=-1)
    return np.where(enough, low, np.nan), np.where(enough, high, np.nan)


def difference(statistic: Statistic, first: str, second: str) -> tuple[float, float]:
    """The 95% interval of how much more one recipe scores than another on the same resamples.

    Args:
        statistic: The scores.
        first: Name of the recipe that is to have more.
        second: Of the other.
    """
    replicates = bootstrap(statistic)
    first_row, second_row = (statistic.recipes.index(name) for name in (first, second))
    low, high = interval(replicates[first_row] - replicates[second_row])
    return float(low), float(high)


#: An interval that is just narrow enough leaves out 0 on every second sample of items. To do so on four in five, it has
#: to be narrower by (1.96 + 0.84) / 1.96.
_POWER = 1.43


def items_to_tell(difference: Estimate, items: int) -> int | None:
    r"""About how many items it takes to tell a difference of this size from 0, four times in five.

    An interval's width falls with the square root of the number of items:

    .. math:: n' = n \left( \frac{z_{0.975} + z_{0.8}}{z_{0.975}} \cdot \frac{w}{|d|} \right)^2

    with w half the width of the interval on n items. It takes the difference as it was measured for the true one, so it
    is no more than a hint at the order of magnitude.

    Args:
        difference: d, of two recipes on the same items, with its 95% interval.
        items: n, which it was measured on.

    Returns:
        n'; None where there is no interval, or the difference is 0.
    """
    half = (difference.high - difference.low) / 2
    if np.isnan(half) or difference.value == 0:
        return None
    return round(items * (_POWER * half / abs(difference.value)) ** 2)


def mean(scores: Mapping[str, ArrayLike]) -> Statistic:
    """The mean of per-item scores: accuracy, nDCG, a distance.

    Args:
        scores: For each recipe (N,). One that holds NaN has no score.

    Raises:
        ValueError: If there are none, or they are not equally many.
    """
    recipes, rows = _stacked(scores)
    return Statistic(recipes, rows.shape[1], lambda counts: rows @ counts / rows.shape[1], MadeFrom("mean", rows))


def pearson(predictions: Mapping[str, ArrayLike], labels: ArrayLike) -> Statistic:
    """The Pearson correlation of each recipe's predictions with labels.

    Args:
        predictions: For each recipe (N,), such as cosine similarities. One that holds NaN has no score.
        labels: (N,).

    Raises:
        ValueError: If there are none, or they are not equally many, or a label is not finite.
    """
    recipes, rows, target = _with_labels(predictions, labels)
    rows = rows - rows.mean(axis=1, keepdims=True)
    target = target - target.mean()

    def of_counts(counts: Array) -> Array:
        first, second = rows @ counts, target @ counts
        covariance = (rows * target) @ counts - first * second / target.size
        return _correlation(covariance, _spread(rows**2 @ counts, first), _spread(target**2 @ counts, second))

    def _spread(squares: Array, sums: Array) -> Array:
        """Sums of squares about the mean; nothing but rounding counts as 0."""
        spread = squares - sums**2 / target.size
        return np.where(spread > 1e-12 * squares, spread, 0.0)

    return Statistic(recipes, target.size, of_counts)


def spearman(predictions: Mapping[str, ArrayLike], labels: ArrayLike) -> Statistic:
    """The Spearman correlation of each recipe's predictions with labels; equals share the mean of their ranks.

    Args:
        predictions: For each recipe (N,), such as cosine similarities. One that holds NaN has no score.
        labels: (N,).

    Raises:
        ValueError: If there are none, or they are not equally many, or a label is not finite.
    """
    recipes, rows, target = _with_labels(predictions, labels)
    orders = [_Order(row) for row in rows]
    unranked = np.isnan(rows).any(axis=1, keepdims=True)
    label_order = _Order(target)

    def of_counts(counts: Array) -> Array:
        groups = label_order.sums(counts)
        ranked = counts * label_order.spread(np.cumsum(groups, axis=0) - (groups + target.size) / 2)
        spread = _rank_spread(groups)
        scores = np.stack([_rank_correlation(order, counts, ranked, spread) for order in orders])
        return np.where(unranked, np.nan, scores)

    return Statistic(recipes, target.size, of_counts, MadeFrom("spearman", rows, target))


def partial_spearman(predictions: Mapping[str, ArrayLike], labels: ArrayLike, given: ArrayLike) -> Statistic:
    r"""The Spearman correlation of each recipe's predictions with labels that is left once another's are given.

    .. math:: \rho_{xy \cdot z} = \frac{\rho_{xy} - \rho_{xz} \rho_{yz}}{\sqrt{(1 - \rho_{xz}^2)(1 - \rho_{yz}^2)}}

    the correlation of what a straight line through the ranks of z leaves of the ranks of x and of y.

    Args:
        predictions: x: for each recipe (N,). One that holds NaN, or has the order of z, has no score.
        labels: y, (N,).
        given: z, (N,).

    Raises:
        ValueError: If there are none, or they are not equally many, or a label is not finite.
    """
    with_labels = spearman(predictions, labels)
    with_given = spearman(predictions, given)
    between = spearman({"given": given}, labels)

    def of_counts(counts: Array) -> Array:
        first, second, third = (each.of_counts(counts) for each in (with_labels, with_given, between))
        left = (1 - second**2) * (1 - third**2)
        # Nothing but rounding counts as none left.
        left = np.where(left > 1e-12, left, 0.0)
        return _correlation(first - second * third, left, np.ones_like(left))

    return Statistic(with_labels.recipes, with_labels.items, of_counts)


def average_precision(predictions: Mapping[str, ArrayLike], labels: ArrayLike) -> Statistic:
    r"""The average precision of each recipe's predictions, for labels of two classes.

    .. math:: \mathrm{AP} = \sum_t (R_t - R_{t-1}) P_t

    with recall R and precision P of the items whose prediction is no less than t, over the values t of the predictions
    from the highest on: scikit-learn's ``average_precision_score``.

    Args:
        predictions: For each recipe (N,), such as cosine similarities. One that holds NaN has no score.
        labels: (N,), 1 for the items to be found and 0 for the others.

    Raises:
        ValueError: If there are none, or they are not equally many, or a label is not finite.
    """
    recipes, rows, target = _with_labels(predictions, labels)
    orders = [_Order(row) for row in rows]
    unranked = np.isnan(rows).any(axis=1, keepdims=True)

    def of_counts(counts: Array) -> Array:
        scores = np.stack([_average_precision(order, counts, target) for order in orders])
        return np.where(unranked, np.nan, scores)

    return Statistic(recipes, target.size, of_counts, MadeFrom("average_precision", rows, target))


class _Order:
    """N values in ascending order, in groups of equals."""

    def __init__(self, values: Array) -> None:
        self.order = np.argsort(values, kind="stable")
        ordered = values[self.order]
        self.starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        self.sizes = np.diff(np.r_[self.starts, len(values)])

    def sums(self, items: Array) -> Array:
        """From (N, R) to the sum of each group, (G, R)."""
        ordered = items[self.order]
        return ordered if len(self.starts) == len(items) else np.add.reduceat(ordered, self.starts, axis=0)

    def spread(self, groups: Array) -> Array:
        """From (G, R) to each item's group's number, (N, R)."""
        items = np.empty((len(self.order), groups.shape[1]))
        items[self.order] = np.repeat(groups, self.sizes, axis=0)
        return items


def _average_precision(order: _Order, counts: Array, labels: Array) -> Array:
    """(R,): of ordered values; NaN where no item is to be found."""
    every = order.sums(counts)
    found = order.sums(counts * labels[:, None])
    # From each value upwards.
    above, found_above = (np.cumsum(each[::-1], axis=0)[::-1] for each in (every, found))
    precision = np.divide(found_above, above, out=np.zeros_like(above), where=above > 0)
    total = found_above[0]
    return np.divide((found * precision).sum(axis=0), total, out=np.full_like(total, np.nan), where=total > 0)


def _rank_correlation(order: _Order, counts: Array, ranked: Array, spread: Array) -> Array:
    """(R,): the Spearman correlation of ordered values with others.

    Args:
        order: Of the values.
        counts: (N, R).
        ranked: (N, R), the others' centered ranks times the counts.
        spread: (R,), the others' sum of squared centered ranks.
    """
    groups = order.sums(counts)
    others = order.sums(ranked)
    # A group's rank is its last one's less half its size; the others' ranks are centered, so these need not be.
    covariance = np.einsum("gr,gr->r", np.cumsum(groups, axis=0), others) - np.einsum("gr,gr->r", groups, others) / 2
    return _correlation(covariance, _rank_spread(groups), spread)


def _rank_spread(groups: Array) -> Array:
    """(R,): the sum of squares of all items' ranks about their mean."""
    return (groups.sum(axis=0) ** 3 - np.einsum("gr,gr,gr->r", groups, groups, groups)) / 12


def _correlation(covariance: Array, first: Array, second: Array) -> Array:
    """NaN where either spread is 0."""
    spread = np.sqrt(first * second)
    return np.divide(covariance, spread, out=np.full_like(covariance, np.nan), where=spread > 0)


def _counts(items: int, resamples: int, seed: int) -> Iterator[Array]:
    """How often each item is drawn, (N, R), for some of the resamples at a time."""
    generator = np.random.default_rng(seed)
    size = max(1, _BLOCK // items)
    for start in range(0, resamples, size):
        width = min(size, resamples - start)
        drawn = generator.integers(items, size=(width, items)) * width + np.arange(width)[:, None]
        yield np.bincount(drawn.ravel(), minlength=items * width).reshape(items, width).astype(np.float64)


def _tied(
    statistic: Statistic, values: Array, replicates: Array, controls: Collection[str], greater_is_better: bool
) -> NDArray[np.bool_]:
    """(M,): the recipes that cannot be told from the best."""
    candidates = np.array([name not in controls for name in statistic.recipes]) & ~np.isnan(values)
    if not candidates.any():
        return candidates
    ranking = np.where(candidates, values if greater_is_better else -values, -np.inf)
    low, high = interval(replicates - replicates[ranking.argmax()])
    apart = (low > 0) | (high < 0)
    return candidates & ~apart


def _with_labels(predictions: Mapping[str, ArrayLike], labels: ArrayLike) -> tuple[list[str], Array, Array]:
    recipes, rows = _stacked(predictions)
    target = np.asarray(labels, dtype=np.float64)
    if target.shape != rows.shape[1:]:
        raise ValueError(f"{rows.shape[1]} predictions and {target.size} labels were given: give one label an item.")
    if not np.isfinite(target).all():
        raise ValueError("Some labels are not finite: give a number for each item.")
    return recipes, rows, target


def _stacked(scores: Mapping[str, ArrayLike]) -> tuple[list[str], Array]:
    """Names, and (M, N)."""
    rows = [np.asarray(own, dtype=np.float64).ravel() for own in scores.values()]
    _same_length(dict(zip(scores, map(len, rows), strict=True)))
    return list(scores), np.stack(rows)


def _same_length(lengths: Mapping[str, int]) -> int:
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"Every recipe needs the same items, at least one, but these were given: {dict(lengths)}.")
    return next(iter(lengths.values()))
