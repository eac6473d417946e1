"""Which results are better than which."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..evaluation import bootstrap
from ..evaluation.bootstrap import Estimate, Statistic

if TYPE_CHECKING:
    from .results import Result, Task


def has_number(result: Result, task: Task) -> bool:
    """Whether a result has a score on a task, and one that is not NaN."""
    return task.name in result.scores and not math.isnan(result.scores[task.name].value)


def rank(result: Result, task: Task) -> float:
    """A key that sorts the best first and those without a number last."""
    if not has_number(result, task):
        return math.inf
    value = result.scores[task.name].value
    return -value if task.greater_is_better else value


def as_high(first: Result, second: Result, task: Task) -> bool:
    """Whether the first is at least as good as the second, by the figures that are shown: equals there are equal."""
    if not (has_number(first, task) and has_number(second, task)):
        return has_number(first, task)
    shown = [task.show(result.scores[task.name].value) for result in (first, second)]
    return rank(first, task) <= rank(second, task) or shown[0] == shown[1]


def best_of(results: Iterable[Result], task: Task, *, control: bool = False) -> Result | None:
    """The best recipe, or the best control, on a task; the earliest of equals, None if none has a number there."""
    scored = [result for result in results if result.control is control and has_number(result, task)]
    return min(scored, key=lambda result: rank(result, task), default=None)


def difference(first: Result, second: Result, task: Task, statistic: Statistic | None) -> Estimate:
    """First less second, with the interval of the paired difference; tied if that cannot be told from 0.

    Args:
        first: Has a score.
        second: Likewise.
        task: What they are compared on.
        statistic: Its scores by the results' names; None if nothing can be resampled.
    """
    value = first.scores[task.name].value - second.scores[task.name].value
    if statistic is None:
        return Estimate(value, math.nan, math.nan, tied=True)
    low, high = bootstrap.difference(statistic, first.name, second.name)
    return Estimate(value, low, high, tied=not (low > 0 or high < 0))


def pareto_front(results: Iterable[Result], task: Task) -> list[Result]:
    """Those that nothing cheaper equals or beats, from the cheapest to the dearest, of those that were timed."""
    timed = [(result.cost, rank(result, task), result) for result in results if result.cost is not None]
    front: list[Result] = []
    for _, place, result in sorted(timed, key=lambda entry: entry[:2]):
        if place < (rank(front[-1], task) if front else math.inf):
            front.append(result)
    return front
