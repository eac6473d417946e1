"""How sure the scores of mteb tasks are, and which variants cannot be told from the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import numpy as np

from ...evaluation.bootstrap import Array, Estimate, Statistic, estimate, mean, pearson, spearman
from .run import TaskScores
from .samples import Sample


def mteb_estimates(
    scores: TaskScores, *, controls: Collection[str] = (), resamples: int = 1000, seed: int = 0
) -> dict[str, Estimate]:
    """Each variant's main score on a task with its 95% interval, and whether it is tied with the best.

    What is resampled depends on what mteb tells: the pairs of STS and of pair classification, the test texts of
    classification (with the training draws as they are), the queries of retrieval and reranking; else, the clusterings
    or training draws, of which mteb makes a few: such an interval says how sure their mean is, and nothing of other
    texts. The value itself is mteb's. Where a variant has nothing to resample, no variant has an interval, and none but
    the best is tied.

    Args:
        scores: What every variant reached.
        controls: Variants that are there to be beaten.
        resamples: How many.
        seed: Of the generator.
    """
    values = {variant: score.value for variant, score in scores.scores.items()}
    samples = {variant: score.samples for variant, score in scores.scores.items()}
    if not all(samples.values()):
        own = {variant: value for variant, value in values.items() if variant not in controls}
        best = max(own, key=own.__getitem__, default=None)
        return {variant: Estimate(value, math.nan, math.nan, variant == best) for variant, value in values.items()}
    found = estimate(score_statistic(samples), controls=controls, resamples=resamples, seed=seed)
    return {variant: Estimate(values[variant], one.low, one.high, one.tied) for variant, one in found.items()}


def score_statistic(samples: Mapping[str, Sequence[Sample]]) -> Statistic:
    """The main score as a statistic of the items of all splits, one after another.

    Args:
        samples: By variant; each has the same splits, with the same items.
    """
    splits = [_statistic(dict(zip(samples, alike, strict=True))) for alike in zip(*samples.values(), strict=True)]
    sizes = [split.items for split in splits]

    def of_counts(counts: Array) -> Array:
        scores = []
        for split, own in zip(splits, np.split(counts, np.cumsum(sizes)[:-1]), strict=True):
            # A split's share of the draws varies; its score does not depend on it.
            drawn = own.sum(axis=0)
            weights = np.divide(own * split.items, drawn, out=np.full_like(own, np.nan), where=drawn > 0)
            scores.append(split.of_counts(weights))
        return cast(Array, np.mean(scores, axis=0))

    return Statistic(list(samples), sum(sizes), of_counts)


def _statistic(samples: Mapping[str, Sample]) -> Statistic:
    """One split's score for every variant."""
    one = next(iter(samples.values()))
    values = {variant: sample.values for variant, sample in samples.items()}
    if one.labels is None:
        return mean(values)
    if one.statistic in _CORRELATIONS:
        return _CORRELATIONS[one.statistic](values, one.labels)
    score = _PAIR_SCORES[one.statistic]
    positive = (one.labels == 1).astype(np.float64)

    def of_counts(counts: Array) -> Array:
        return np.stack(
            [np.max([score(column, positive, counts) for column in own.T], axis=0) for own in values.values()]
        )

    return Statistic(list(values), len(one), of_counts)


def _best_accuracy(values: Array, positive: Array, counts: Array) -> Array:
    """(R,): the share of pairs on the right side of the best threshold between two values, as in mteb."""
    found, seen = _cumulative(values, positive, counts)
    between = (seen > 0) & (seen < seen[-1])
    right = found + (seen[-1] - found[-1]) - (seen - found)
    return cast(Array, np.where(between, right, 0).max(axis=0) / seen[-1])


def _average_precision(values: Array, positive: Array, counts: Array) -> Array:
    """(R,): precision at each value, weighted by the share of the positives that have it."""
    found, seen = _cumulative(values, positive, counts)
    precision = np.divide(found, seen, out=np.zeros_like(found), where=seen > 0)
    area = (np.diff(found, axis=0, prepend=0) * precision).sum(axis=0)
    return np.divide(area, found[-1], out=np.full_like(area, np.nan), where=found[-1] > 0)


def _cumulative(values: Array, positive: Array, counts: Array) -> tuple[Array, Array]:
    """How many positives, and how many pairs, were drawn down to each different value: (V, R) each."""
    order = np.argsort(-values, kind="stable")
    ends = np.flatnonzero(np.r_[np.diff(values[order]) != 0, True])
    drawn = counts[order]
    return np.cumsum(positive[order, None] * drawn, axis=0)[ends], np.cumsum(drawn, axis=0)[ends]


_CORRELATIONS: dict[str, Callable[..., Statistic]] = {"spearman": spearman, "pearson": pearson}
_PAIR_SCORES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "best_accuracy": _best_accuracy,
    "average_precision": _average_precision,
}
