"""How sure a score is: bootstrap intervals, and which recipes cannot be told from the best.

Scores are made from :class:`Items`, plain data: what each recipe gave for each of N items (sentence pairs, questions,
texts). Items are drawn with replacement, and all recipes of a table see the same resamples, so that differences between
them are paired: what makes an item hard makes it hard for all, and the difference of two recipes is surer than either
score.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

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


#: What a score is of the values of the items.
Kind = Literal["mean", "spearman", "pearson", "partial_spearman", "average_precision"]


@dataclass(frozen=True)
class Items:
    """What each recipe gave for each of N items, and which score that makes: see :func:`mean`, :func:`spearman`,
    :func:`pearson`, :func:`partial_spearman` and :func:`average_precision`, which check what they are given.

    Attributes:
        kind: The score.
        values: (N,) by recipe; NaN is no value, and a recipe that has one has no score.
        labels: (N,); empty where the score needs none.
        given: (N,), what a partial correlation is given; else empty.
    """

    kind: Kind
    values: Mapping[str, Any]
    labels: Sequence[float] | Array = ()
    given: Sequence[float] | Array = ()

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    @property
    def recipes(self) -> list[str]:
        """M names."""
        return list(self.values)

    def part(self, chosen: slice) -> Items:
        """Some of the items."""
        values = {recipe: own[chosen] for recipe, own in self.values.items()}
        return Items(self.kind, values, self.labels[chosen], self.given[chosen])

    @cached_property
    def scores(self) -> Array:
        """(M,): on all items."""
        return self.scored(np.arange(len(self))[None])[:, 0]

    @cached_property
    def replicates(self) -> Array:
        """(M, R): on :data:`RESAMPLES` resamples, drawn once, however many differences are asked for."""
        return self.drawn(RESAMPLES, 0)

    def drawn(self, resamples: int, seed: int) -> Array:
        """(M, R): on R resamples of the items; NaN where a resample has no score, or there is only one item."""
        if len(self) < 2:
            return np.full((len(self.values), resamples), np.nan)
        generator, rows = np.random.default_rng(seed), max(1, _BLOCK // len(self))
        sizes = [min(rows, resamples - start) for start in range(0, resamples, rows)]
        blocks = [self.scored(generator.integers(len(self), size=(size, len(self)))) for size in sizes]
        return np.concatenate(blocks, axis=1)

    def scored(self, drawn: Indices) -> Array:
        """(M, R): on the items of each row of (R, N) indices."""
        look_up = _ranks if self.kind in ("spearman", "partial_spearman") else _picked
        beside = [look_up(column, drawn) for column in (self.labels, self.given) if len(column)]

        def score(values: Array) -> Array:
            if np.isnan(values).any():
                return np.full(len(drawn), np.nan)
            return _SCORES[self.kind](values, drawn, *beside)

        return np.stack([score(np.asarray(values, dtype=np.float64)) for values in self.values.values()])


@dataclass(frozen=True)
class Splits:
    """A score that is the mean of several, each of items of its own: they are resampled one by one.

    Attributes:
        parts: With the same recipes.
    """

    parts: Sequence[Items]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def recipes(self) -> list[str]:
        """M names."""
        return self.parts[0].recipes

    @cached_property
    def scores(self) -> Array:
        """(M,): the mean of the parts' own."""
        return np.mean([part.scores for part in self.parts], axis=0)

    @cached_property
    def replicates(self) -> Array:
        """(M, R): as for :class:`Items`."""
        return self.drawn(RESAMPLES, 0)

    def drawn(self, resamples: int, seed: int) -> Array:
        """(M, R): as for :class:`Items`."""
        return np.mean([part.drawn(resamples, seed + place) for place, part in enumerate(self.parts)], axis=0)

    def joined(self) -> Items:
        """All items, as if they were one part's."""
        values = {name: np.concatenate([part.values[name] for part in self.parts]) for name in self.recipes}
        labels, given = (np.concatenate([getattr(part, of) for part in self.parts]) for of in ("labels", "given"))
        return Items(self.parts[0].kind, values, labels, given)


#: What can be resampled.
Resampled: TypeAlias = Items | Splits


def by_halves(items: Items, first: int) -> Resampled:
    """A score as the mean of those of two halves, of which the first has so many items; 0: of all items.

    A mean over items stays what it is: what an item gives has nothing to do with those of the other half.
    """
    if items.kind == "mean" or not first:
        return items
    return Splits([items.part(slice(first)), items.part(slice(first, None))])


def estimate(items: Resampled, *, controls: Collection[str] = ()) -> dict[str, Estimate]:
    """Each recipe's score with its 95% interval, and whether it is tied with the best.

    The best is the recipe, not a control, with the best score on all items; the earliest of equals. A recipe is tied
    with it if the 95% interval of their paired difference holds 0, or cannot be had. Where more than a tenth of the
    resamples have no score (all labels alike, in a correlation), an interval is NaN, with one warning.

    Args:
        items: What is scored.
        controls: Those of its recipes that are there to be beaten: never the best, never tied.

    Returns:
        One estimate for each recipe.

    Raises:
        ValueError: If a control is none of the recipes.
    """
    if unknown := sorted(set(controls) - set(items.recipes)):
        raise ValueError(f"controls={unknown} are none of the recipes {items.recipes}.")
    values, replicates = items.scores, items.replicates
    lows, highs = interval(replicates)
    if without := [name for name, low, value in zip(items.recipes, lows, values, strict=True)
                   if np.isnan(low) and not np.isnan(value)]:  # fmt: skip
        warnings.warn(
            f"There is no interval for {', '.join(without)}: too few resamples of the {len(items)} items have a "
            "score. More items are needed, or more that differ.",
            stacklevel=2,
        )
    tied = np.array([name not in controls for name in items.recipes]) & ~np.isnan(values)
    if tied.any():
        best = np.where(tied, values, -np.inf).argmax()
        low, high = interval(replicates - replicates[best])
        tied &= ~((low > 0) | (high < 0))
    found = zip(values.tolist(), lows.tolist(), highs.tolist(), tied.tolist(), strict=True)
    return {name: Estimate(*own) for name, own in zip(items.recipes, found, strict=True)}


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


def difference(items: Resampled, first: str, second: str) -> tuple[float, float]:
    """The 95% interval of how much more one recipe scores than another on the same resamples.

    Args:
        items: What is scored.
        first: Name of the recipe that is to have more.
        second: Of the other.
    """
    first_row, second_row = (items.recipes.index(name) for name in (first, second))
    low, high = interval(items.replicates[first_row] - items.replicates[second_row])
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


# What is scored


def mean(scores: Mapping[str, ArrayLike]) -> Items:
    """The mean of per-item scores: accuracy, nDCG, a distance.

    Args:
        scores: For each recipe (N,). One that holds NaN has no score.

    Raises:
        ValueError: If there are none, or they are not equally many.
    """
    return checked_items("mean", scores)


def pearson(predictions: Mapping[str, ArrayLike], labels: ArrayLike) -> Items:
    """The Pearson correlation of each recipe's predictions with labels.

    Args:
        predictions: For each recipe (N,), such as cosine similarities. One that holds NaN has no score.
        labels: (N,).

    Raises:
        ValueError: If there are none, or they are not equally many, or a label is not finite.
    """
    return checked_items("pearson", predictions, labels)


def spearman(predictions: Mapping[str, ArrayLike], labels: ArrayLike) -> Items:
    """The Spearman correlation of each recipe's predictions with labels; equals share the mean of their ranks.

    Args and errors as for :func:`pearson`.
    """
    return checked_items("spearman", predictions, labels)


def partial_spearman(predictions: Mapping[str, ArrayLike], labels: ArrayLike, given: ArrayLike) -> Items:
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
    return checked_items("partial_spearman", predictions, labels, given)


def average_precision(predictions: Mapping[str, ArrayLike], labels: ArrayLike) -> Items:
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
    return checked_items("average_precision", predictions, labels)


def checked_items(kind: Kind, scores: Mapping[str, ArrayLike], *beside: ArrayLike) -> Items:
    """The items of any score: of each recipe (N,), and beside these the labels, and what is given, (N,) each.

    Raises:
        ValueError: If there are none, or they are not equally many, or a label is not finite.
    """
    values = {recipe: np.asarray(own, dtype=np.float64).ravel() for recipe, own in scores.items()}
    lengths = {recipe: len(own) for recipe, own in values.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"Every recipe needs the same items, at least one, but these were given: {lengths}.")
    columns = [np.asarray(column, dtype=np.float64) for column in beside]
    [count] = set(lengths.values())
    for column in columns:
        if column.shape != (count,):
            raise ValueError(f"{count} predictions and {column.size} labels were given: give one label an item.")
        if not np.isfinite(column).all():
            raise ValueError("Some labels are not finite: give a number for each item.")
    return Items(kind, values, *columns)


# Scores of resamples: from a recipe's values, (N,), the resamples, (R, N), and labels as they are drawn, to (R,)


def _mean(values: Array, drawn: Indices) -> Array:
    return values[drawn].mean(axis=1)


def _pearson(values: Array, drawn: Indices, labels: Array) -> Array:
    return _correlation(values[drawn], labels)


def _spearman(values: Array, drawn: Indices, labels: Array) -> Array:
    return _correlation(_ranks(values, drawn), labels)


def _partial_spearman(values: Array, drawn: Indices, labels: Array, given: Array) -> Array:
    ranks = _ranks(values, drawn)
    with_given, between = _correlation(ranks, given), _correlation(labels, given)
    left = (1 - with_given**2) * (1 - between**2)
    # What rounding leaves is nothing.
    left = np.where(left > 1e-12, left, np.nan)
    return (_correlation(ranks, labels) - with_given * between) / np.sqrt(left)


def _average_precision(values: Array, drawn: Indices, labels: Array) -> Array:
    """The mean precision of those that are to be found, each at its own value."""
    found, seen = (_at_least(values, drawn, weights) for weights in (labels, None))
    total = labels.sum(axis=1)
    return (labels * found / seen).sum(axis=1) / np.where(total > 0, total, np.nan)


_SCORES: dict[Kind, Callable[..., Array]] = {
    "mean": _mean,
    "pearson": _pearson,
    "spearman": _spearman,
    "partial_spearman": _partial_spearman,
    "average_precision": _average_precision,
}


def _picked(values: ArrayLike, drawn: Indices) -> Array:
    """(R, N): what is drawn."""
    return np.asarray(values, dtype=np.float64)[drawn]


def _ranks(values: ArrayLike, drawn: Indices) -> Array:
    """(R, N): the ranks of what is drawn; equals share the mean of theirs."""
    counts, chosen = _counts(values, drawn)
    return np.take_along_axis(np.cumsum(counts, axis=1) - (counts - 1) / 2, chosen, axis=1)


def _at_least(values: Array, drawn: Indices, weights: Array | None) -> Array:
    """(R, N): how many of what is drawn have the value of each draw or more, or what they weigh."""
    counts, chosen = _counts(values, drawn, weights)
    return np.take_along_axis(counts[:, ::-1].cumsum(axis=1)[:, ::-1], chosen, axis=1)


def _counts(values: ArrayLike, drawn: Indices, weights: Array | None = None) -> tuple[Array, Indices]:
    """How often each of G different values is drawn, (R, G), in ascending order; and which one each draw is, (R, N)."""
    different, places = np.unique(np.asarray(values), return_inverse=True)
    chosen = places[drawn]
    slots = chosen + len(different) * np.arange(len(drawn))[:, None]
    counts = np.bincount(slots.ravel(), None if weights is None else weights.ravel(), len(different) * len(drawn))
    return counts.reshape(len(drawn), -1).astype(np.float64), chosen


def _correlation(first: Array, second: Array) -> Array:
    """(R,), of (R, N) each; NaN where one of them does not vary, but by rounding."""
    one, other = (side - side.mean(axis=1, keepdims=True) for side in (first, second))
    squares = [np.einsum("rn,rn->r", side, side) for side in (one, first, other, second)]
    flat = (squares[0] <= 1e-12 * squares[1]) | (squares[2] <= 1e-12 * squares[3])
    spread = np.sqrt(np.where(flat, np.nan, squares[0] * squares[2]))
    return np.einsum("rn,rn->r", one, other) / spread
