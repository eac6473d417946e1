"""Scores of weighted items, and confidence intervals from bootstrap replicates.

A score is made of :class:`Items`: the values that each recipe has on N items (pairs, queries, texts), and labels. A
bootstrap replicate is a weight for each item: how often it was drawn. All recipes share the replicates, so that their
differences are paired.

Intervals and statements about differences hold for everything that is compared at once (max-T): each replicate's
largest statistic over all rows decides how wide they are. Correlations are resampled on Fisher's scale and shares on
the logit scale, where their spread hardly depends on their size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

#: Number of bootstrap replicates.
REPLICATES = 400
#: Share of replicates that an interval leaves out, and that a statement about a difference may be wrong in.
LEVEL = 0.05
#: Number of items above which the replicates of a rank statistic are linear in its influence values.
EXACT = 2000

# Replicates without a score are left out; where more than this share are, there is no interval.
_MOST_UNDEFINED = 0.1
# Least half width of the interval of a share that is 0 or 1, on the logit scale: that of the exact binomial interval of
# the best of ten. It falls with the number of items that are wrong, and binds where there are none or hardly any.
_AT_AN_END = 2.6


@dataclass(frozen=True)
class Estimate:
    """One score and its confidence interval.

    Attributes:
        value: Score in the metric's own unit (a correlation, an accuracy).
        low: Lower end of the simultaneous 95% interval.
        high: Upper end; both NaN where there is no interval.
        tied: Whether the score cannot be told from the best recipe's. The best itself is tied; a control never is.
        corrected: Of the best recipe alone: the value less what the best of many exceeds its own score by. The interval
            is around it.
    """

    value: float
    low: float
    high: float
    tied: bool = False
    corrected: float | None = None

    @property
    def best_guess(self) -> float:
        """The corrected value where there is one, else the value."""
        return self.value if self.corrected is None else self.corrected


#: Statistic of the values of the items.
Kind = Literal["mean", "spearman", "pearson", "average_precision"]


@dataclass(frozen=True)
class Items:
    """Values of each recipe on N items, and the statistic that is their score.

    See :func:`mean`, :func:`spearman`, :func:`pearson` and :func:`checked_items`, which check what they are given.

    Attributes:
        kind: The statistic.
        values: (N,) by recipe. A recipe with a NaN has no score.
        labels: (N,); empty where the statistic needs none.
    """

    kind: Kind
    values: Mapping[str, Any]
    labels: Sequence[float] | Array = ()

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    @cached_property
    def scores(self) -> Array:
        """Scores on all items, (M,)."""
        return self.scored(np.ones((1, len(self))))[:, 0]

    @cached_property
    def replicates(self) -> Array:
        """Scores on :data:`REPLICATES` bootstrap replicates, (M, B)."""
        return self.scored(draw_weights(np.arange(len(self)))[1:])

    def scored(self, weights: Array) -> Array:
        """Return scores under item weights, (M, B).

        Args:
            weights: (B, N).
        """
        rows = np.stack([np.asarray(row, dtype=np.float64) for row in self.values.values()])
        return scorer(self.kind, weights, self.labels)(rows)


def draw_weights(groups: Indices, replicates: int = REPLICATES, seed: int = 0) -> Array:
    """Draw how often each item counts in each bootstrap replicate, (1 + B, N); the first row is ones.

    Args:
        groups: (N,), the group of each item, from 0. Groups are drawn, with replacement, as a whole.
        replicates: B.
        seed: Seed of the draws.
    """
    count, generator = int(groups.max()) + 1, np.random.default_rng(seed)
    drawn = [np.bincount(generator.integers(count, size=count), minlength=count)[groups] for _ in range(replicates)]
    dtype = np.float64 if len(groups) <= EXACT else np.float32
    return np.stack([np.ones(len(groups), dtype=dtype), *(counts.astype(dtype) for counts in drawn)])


# Statistics under weights


def scorer(kind: Kind, weights: Array, labels: ArrayLike = ()) -> Callable[[Array], Array]:
    """Return a function from values (M, N) to scores under item weights (M, B).

    Rows with a NaN have the score NaN, and so have weights under which the statistic is undefined.

    Args:
        kind: The statistic.
        weights: (B, N).
        labels: (N,), where the statistic needs them.
    """
    score = _SCORERS[kind](weights, np.asarray(labels, dtype=np.float64))

    def scored(values: Array) -> Array:
        scores, proper = np.full((len(values), len(weights)), np.nan), ~np.isnan(values).any(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            if proper.any():
                scores[proper] = score(values[proper])
        return scores

    return scored


def _mean_scorer(weights: Array, labels: Array | None = None) -> Callable[[Array], Array]:
    total = weights.sum(axis=1)
    return lambda values: np.asarray(values.astype(weights.dtype) @ weights.T / total, dtype=np.float64)


def _linear(weights: Array, statistic: Callable[[Array], tuple[float, Array]]) -> Callable[[Array], Array]:
    """Return a scorer that is linear in influence values: ``statistic`` returns the score and these, (N,)."""
    mean = _mean_scorer(weights)

    def score(values: Array) -> Array:
        pairs = [statistic(row) for row in values]
        return mean(np.stack([value + influence - influence.mean() for value, influence in pairs]))

    return score


def _pearson_scorer(weights: Array, labels: Array) -> Callable[[Array], Array]:
    side = _weighted_deviations(labels, weights)
    return lambda values: np.stack([_correlation(_weighted_deviations(row, weights), side, weights) for row in values])


def _spearman_scorer(weights: Array, labels: Array) -> Callable[[Array], Array]:
    if weights.shape[1] > EXACT:
        by_label = _Order(labels)
        return _linear(weights, lambda values: _spearman_influence(_Order(values), by_label))
    side = _midranks(labels, weights)
    return lambda values: np.stack([_correlation(_midranks(row, weights), side, weights) for row in values])


def _average_precision_scorer(weights: Array, labels: Array) -> Callable[[Array], Array]:
    if weights.shape[1] > EXACT:
        return _linear(weights, lambda values: _average_precision_influence(values, labels))
    positive = weights * labels
    total = positive.sum(axis=1)

    def score(values: Array) -> Array:
        # The precision of an item counts all that have its value or more.
        order = _Order(-values)
        precision = order.spread(order.up_to(positive) / np.maximum(order.up_to(weights), 1e-300))
        return np.asarray((positive * precision).sum(axis=1) / total)

    return lambda values: np.stack([score(row) for row in values])


_SCORERS: dict[Kind, Callable[[Array, Array], Callable[[Array], Array]]] = {
    "mean": _mean_scorer,
    "pearson": _pearson_scorer,
    "spearman": _spearman_scorer,
    "average_precision": _average_precision_scorer,
}


class _Order:
    """Items in ascending order of N values, equal ones together.

    Args:
        values: (N,).
    """

    def __init__(self, values: Array) -> None:
        self.order = np.argsort(values, kind="stable")
        ordered = values[self.order]
        starts = np.concatenate([[True], ordered[1:] != ordered[:-1]])
        self.starts = np.flatnonzero(starts)
        self.place = np.empty(len(values), dtype=np.int64)
        self.place[self.order] = np.cumsum(starts) - 1

    def sums(self, amounts: Array) -> Array:
        """Return sums of (..., N) over equal values, (..., G)."""
        ordered = amounts[..., self.order]
        return ordered if len(self.starts) == len(self.order) else np.add.reduceat(ordered, self.starts, axis=-1)

    def up_to(self, amounts: Array) -> Array:
        """Return sums of (..., N) over values up to and with each different one, (..., G)."""
        return np.cumsum(self.sums(amounts), axis=-1)

    def spread(self, by_value: Array) -> Array:
        """Return for each item what its value has: (..., G) to (..., N)."""
        return by_value[..., self.place]


def _midranks(values: Array, weights: Array) -> Array:
    """Return weighted ranks less their mean, (B, N); equal values share the mean of theirs."""
    order = _Order(values)
    sums = order.sums(weights)
    return order.spread(np.cumsum(sums, axis=1) - sums / 2) - weights.sum(axis=1, keepdims=True) / 2


def _weighted_deviations(values: Array, weights: Array) -> Array:
    """Return values less their weighted mean, (B, N)."""
    values = values - values.mean()
    return np.asarray(values - (weights @ values / weights.sum(axis=1))[:, None])


def _correlation(first: Array, second: Array, weights: Array) -> Array:
    """Return weighted correlations of deviations (B, N), (B,); NaN where one of them does not vary."""
    spread = np.sqrt(_squares(first, weights) * _squares(second, weights))
    return np.asarray(np.einsum("bn,bn,bn->b", weights, first, second) / spread)


def _squares(deviations: Array, weights: Array) -> Array:
    """Return weighted sums of the squares of deviations (B, N), (B,); NaN where these are rounding alone."""
    squares = np.einsum("bn,bn,bn->b", weights, deviations, deviations)
    rounding = 1e-12 * weights.sum(axis=1) * np.abs(deviations).max(axis=1) ** 2
    return np.where(squares <= rounding, np.nan, squares)


def _signed_mean(amounts: Array, order: _Order) -> Array:
    """Return for each item z the mean over items i of sign(value_i - value_z) amount_i, (N,)."""
    sums = order.sums(amounts)
    return order.spread(sums.sum() + sums - 2 * np.cumsum(sums)) / len(amounts)


def _spearman_influence(by_value: _Order, by_label: _Order) -> tuple[float, Array]:
    r"""Return Spearman's correlation and the influence of each item on it.

    .. math:: \rho = \frac{E[uv]}{\sqrt{E[u^2] E[v^2]}}, \quad u = E_{x'}[\mathrm{sign}(x - x')]
    """
    u, v = (-_signed_mean(np.ones(len(order.place)), order) for order in (by_value, by_label))
    moments = [float(np.mean(product)) for product in (u * v, u * u, v * v)]
    changes = [
        u * v + _signed_mean(v, by_value) + _signed_mean(u, by_label) - 3 * moments[0],
        u * u + 2 * _signed_mean(u, by_value) - 3 * moments[1],
        v * v + 2 * _signed_mean(v, by_label) - 3 * moments[2],
    ]
    spread = np.sqrt(moments[1] * moments[2])
    rho = moments[0] / spread
    return rho, changes[0] / spread - rho / 2 * (changes[1] / moments[1] + changes[2] / moments[2])


def _average_precision_influence(values: Array, labels: Array) -> tuple[float, Array]:
    """Return the average precision and the influence of each item on it."""
    order = _Order(-values)
    seen, hits = order.up_to(np.ones(len(values))), order.up_to(labels)
    precision, share = hits / seen, float(labels.mean())
    score = float((labels * order.spread(precision)).sum() / labels.sum())
    # An item changes the precision at every value that is at most its own.
    hit_shares = order.sums(labels) / seen
    later = [np.cumsum(shares[::-1])[::-1] for shares in (hit_shares, hit_shares * precision)]
    change = labels * order.spread(later[0]) - order.spread(later[1])
    return score, (labels * (order.spread(precision) - score) + change) / share


# How sure scores are


class Replicated:
    """Scores of M rows, and the same on B bootstrap replicates that all rows share.

    Args:
        scores: By row.
        drawn: (B,) by row.
        kind: The statistic.
        count: Number of items.
        own: Rows among which the best is looked for; None for all.
        sure: False where the replicates are not to be relied on.

    Attributes:
        names: Rows that have a score; those outside ``own`` on the replicates, too.
        best: The row of ``own`` with the best score, the earliest of equals; None if none has a score.
        sure: Whether there are intervals: ``sure``, and enough replicates have a score.
    """

    def __init__(
        self,
        scores: Mapping[str, float],
        drawn: Mapping[str, Array],
        kind: Kind = "mean",
        count: int = 1,
        own: Collection[str] | None = None,
        sure: bool = True,
    ) -> None:
        undefined = {name: np.isnan(drawn[name]).mean() for name, score in scores.items() if not np.isnan(score)}
        # A control without a score on many replicates must not take the intervals of all other rows.
        most = max(_MOST_UNDEFINED, min(undefined.values(), default=0))
        self.names = [name for name, share in undefined.items() if share <= most or own is None or name in own]
        self.scores = np.array([scores[name] for name in self.names])
        self.count, self._is_correlation = count, kind in ("spearman", "pearson")
        self.own = [place for place, name in enumerate(self.names) if own is None or name in own]
        self.best = self.names[max(self.own, key=lambda place: self.scores[place])] if self.own else None
        rows = np.stack([drawn[name] for name in self.names]) if self.names else np.empty((0, 0))
        proper = ~np.isnan(rows).any(axis=0)
        self.sure = sure and bool(proper.any()) and proper.mean() >= 1 - _MOST_UNDEFINED
        self.drawn = rows[:, proper]
        self._place = {name: place for place, name in enumerate(self.names)}

    def __contains__(self, name: object) -> bool:
        return name in self._place

    @cached_property
    def excess(self) -> float:
        """Amount by which the best of a replicate exceeds its own score, on average over replicates."""
        if not self.sure or not self.own:
            return 0.0
        drawn = self.drawn[self.own]
        centred = drawn - drawn.mean(axis=1, keepdims=True)
        best = (self.scores[self.own][:, None] + centred).argmax(axis=0)
        return float(np.take_along_axis(centred, best[None], axis=0).mean())

    def estimates(self, corrects: bool = True) -> dict[str, Estimate]:
        """Return the score and the simultaneous interval of each row.

        Args:
            corrects: Whether the best row's interval is around its corrected score.
        """
        low, high = self._intervals(self.excess if corrects else 0.0)
        rows = {}
        for place, name in enumerate(self.names):
            score, tied = float(self.scores[place]), place in self.own and self.tied(name)
            corrected = score - self.excess if corrects and self.sure and name == self.best else None
            rows[name] = Estimate(score, float(low[place]), float(high[place]), tied, corrected)
        return rows

    def _intervals(self, excess: float) -> tuple[Array, Array]:
        if not self.sure:
            return (np.full(len(self.names), np.nan),) * 2
        centre = self.scores.copy()
        if self.best is not None:
            centre[self._place[self.best]] -= excess
        drawn = self._transformed(self.drawn)
        width = half_widths(drawn)
        if not self._is_correlation:
            # Replicates of items that are all right do not differ.
            wrong = self.count * np.clip(np.minimum(centre, 1 - centre), 0, None)
            width = np.maximum(width, _AT_AN_END * np.sqrt(0.5 / (wrong + 0.5)))
        middle = self._transformed(centre)
        return self._back(middle - width), self._back(middle + width)

    def _transformed(self, values: Array) -> Array:
        if self._is_correlation:
            return np.arctanh(np.clip(values, -0.999999, 0.999999))
        return np.asarray(logit((np.clip(values, 0, 1) * self.count + 0.5) / (self.count + 1)))

    def _back(self, values: Array) -> Array:
        if self._is_correlation:
            return np.tanh(values)
        return np.asarray(np.clip((expit(values) * (self.count + 1) - 0.5) / self.count, 0, 1))

    def ahead(self, name: str, other: str) -> bool:
        """Return whether a row is surely ahead of another one: at once for all of ``own`` against that one.

        The best must be ahead by its corrected score, too.
        """
        return self.sure and self.difference(name, other) > max(self.least(name, other), self.excess)

    def difference(self, name: str, other: str) -> float:
        """Return the score of a row less that of another one."""
        return float(self.scores[self._place[name]] - self.scores[self._place[other]])

    def least(self, name: str, other: str) -> float:
        """Return the smallest difference between a row and another one that :meth:`ahead` tells."""
        rows = self.drawn[self.own] - self.drawn[self._place[other]]
        differences = self.drawn[self._place[name]] - self.drawn[self._place[other]]
        return float(_largest(rows, 1 - LEVEL / 2) * differences.std())

    def tied(self, name: str) -> bool:
        """Return whether a row of ``own`` cannot be told from the best: at once for all pairs of rows."""
        return self.best is None or not self.sure or self.difference(self.best, name) <= self._margin(name)

    def within(self, name: str, margin: float) -> bool:
        """Return whether a row of ``own`` is surely less than ``margin`` behind the best: at once for all pairs."""
        return self.best is not None and self.sure and self.difference(self.best, name) + self._margin(name) < margin

    def _margin(self, name: str) -> float:
        """Return half the width of the interval of the difference between the best and a row of ``own``."""
        difference = self.drawn[self._place[self.best or name]] - self.drawn[self._place[name]]
        return self._critical_value * float(difference.std())

    @cached_property
    def _critical_value(self) -> float:
        """Critical value of the differences between all pairs of ``own``."""
        drawn = self.drawn[self.own]
        largest = np.zeros(drawn.shape[1])
        for place in range(1, len(drawn)):
            np.maximum(largest, _statistics(drawn[:place] - drawn[place], two_sided=True).max(axis=0), out=largest)
        return float(np.quantile(largest, 1 - LEVEL))


def _statistics(drawn: Array, two_sided: bool = False) -> Array:
    """Return centred replicates over their spread, (M, B); 0 where there is none."""
    centred, spread = drawn - drawn.mean(axis=1, keepdims=True), drawn.std(axis=1, keepdims=True)
    ratios = np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 1e-12)
    return np.abs(ratios) if two_sided else ratios


def _largest(drawn: Array, share: float, two_sided: bool = False) -> float:
    """Return the quantile over replicates of the largest statistic of (M, B)."""
    return float(np.quantile(_statistics(drawn, two_sided).max(axis=0), share))


def half_widths(drawn: Array) -> Array:
    """Return half the width of the simultaneous intervals of M rows, (M,), from their replicates.

    Args:
        drawn: (M, B). Replicates with a NaN are left out; if these are more than a tenth, there are no intervals.
    """
    proper = ~np.isnan(drawn).any(axis=0)
    if proper.mean() < 1 - _MOST_UNDEFINED:
        return np.full(len(drawn), np.nan)
    drawn = drawn[:, proper]
    return np.asarray(drawn.std(axis=1) * _largest(drawn, 1 - LEVEL, two_sided=True))


def estimate(items: Items, *, controls: Collection[str] = ()) -> dict[str, Estimate]:
    """Return each recipe's score and simultaneous interval, and whether it is tied with the best.

    The scores are as they are: nothing is taken off the best one.

    Args:
        items: What is scored.
        controls: Controls, which are never the best and never tied.
    """
    scores = dict(zip(items.values, items.scores.tolist(), strict=True))
    drawn = dict(zip(items.values, items.replicates, strict=True))
    own = set(items.values) - set(controls)
    replicated = Replicated(scores, drawn, items.kind, len(items), own, sure=len(items) > 1)
    if not replicated.sure and replicated.names:
        warnings.warn(
            f"There is no interval for {', '.join(replicated.names)}: too few replicates of the {len(items)} items "
            "have a score. More items are needed, or more that differ.",
            stacklevel=2,
        )
    return {name: Estimate(np.nan, np.nan, np.nan) for name in items.values} | replicated.estimates(corrects=False)


# What is scored


def mean(scores: Mapping[str, ArrayLike]) -> Items:
    """Return the items of a mean of per-item scores: accuracy, nDCG, a distance.

    Args:
        scores: For each recipe (N,). One that holds NaN has no score.

    Raises:
        ValueError: If there are none, or they are not equally many.
    """
    return checked_items("mean", scores)


def pearson(predictions: Mapping[str, ArrayLike], labels: ArrayLike) -> Items:
    """Return the items of the Pearson correlation of each recipe's predictions with labels.

    Args:
        predictions: For each recipe (N,), such as cosine similarities. One that holds NaN has no score.
        labels: (N,).

    Raises:
        ValueError: If there are none, or they are not equally many, or a label is not finite.
    """
    return checked_items("pearson", predictions, labels)


def spearman(predictions: Mapping[str, ArrayLike], labels: ArrayLike) -> Items:
    """Return the items of the Spearman correlation with labels; equal values share the mean of their ranks.

    Args and errors as for :func:`pearson`.
    """
    return checked_items("spearman", predictions, labels)


def checked_items(kind: Kind, scores: Mapping[str, ArrayLike], labels: ArrayLike | None = None) -> Items:
    """Return the items of any statistic: for each recipe (N,), and labels (N,).

    Raises:
        ValueError: If there are none, or they are not equally many, or a label is not finite.
    """
    values = {recipe: np.asarray(row, dtype=np.float64).ravel() for recipe, row in scores.items()}
    lengths = {recipe: len(row) for recipe, row in values.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"Every recipe needs the same items, at least one, but these were given: {lengths}.")
    if labels is None:
        return Items(kind, values)
    column, [count] = np.asarray(labels, dtype=np.float64), set(lengths.values())
    if column.shape != (count,):
        raise ValueError(f"{count} predictions and {column.size} labels were given: give one label an item.")
    if not np.isfinite(column).all():
        raise ValueError("Some labels are not finite: give a number for each item.")
    return Items(kind, values, column)
