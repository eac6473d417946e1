"""Differences between two comparisons: whether a new model, prompt or version changed anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..evaluation.bootstrap import Array, Estimate, half_widths
from ..evaluation.tasks import Measure
from .results import Comparison, Result, has_number


@dataclass(frozen=True)
class Difference:
    """Scores of one recipe in two comparisons.

    Attributes:
        name: Name of the result in both.
        old: Score in the older comparison.
        new: Score in the newer one.
        difference: The new score less the old one, with its interval; tied if that contains 0.
    """

    name: str
    old: Estimate
    new: Estimate
    difference: Estimate


@dataclass(frozen=True)
class SideBySide:
    """Differences between two comparisons.

    Attributes:
        task: Task that decides in the newer one.
        changes: Differences of all recipes and controls that both have, in the newer one's order.
        sentences: Sentences: whether anything changed, how the intervals were made, and both answers.
    """

    task: Measure
    changes: list[Difference]
    sentences: list[str]


def side_by_side(new: Comparison, old: Comparison) -> SideBySide:
    """Compare a comparison with an older one.

    Differences are paired, with simultaneous intervals, if both comparisons have replicates of the same items.
    Otherwise the two are independent samples, and half-widths of their intervals add up by their squares, each on its
    side (Zou and Donner, 2008):

    .. math:: d - \\sqrt{(x - l_x)^2 + (u_y - y)^2}, \\quad d + \\sqrt{(u_x - x)^2 + (y - l_y)^2}, \\quad d = x - y

    Args:
        new: The newer comparison.
        old: The older one.

    Raises:
        ValueError: If they were scored by different metrics, or have no result in common.
    """
    task, before = new.tasks[0], old.tasks[0]
    if (task.name, task.metric) != (before.name, before.metric):
        raise ValueError(
            f"The new comparison is by {task.name} ({task.metric}), the old one by {before.name} ({before.metric}): "
            "compare on the same kind of data."
        )
    former = {result.name: result for result in old.results if has_number(result, task)}
    both = [
        (result, former[result.name]) for result in new.results if result.name in former and has_number(result, task)
    ]
    if not both:
        raise ValueError(
            f"The two comparisons have no recipe in common: the old one has {', '.join(former) or 'none'}."
        )
    drawn = _paired_replicates(new, old, [result.name for result, _ in both])
    below, above = _independent_widths(both, task) if drawn is None else [half_widths(drawn)] * 2
    changes = []
    for (now, then), less, more in zip(both, below, above, strict=True):
        after, earlier = now.scores[task.name], then.scores[task.name]
        value = after.value - earlier.value
        low, high = float(value - less), float(value + more)
        # Nothing is told apart without an interval.
        changed = Estimate(value, low, high, tied=not (low > 0 or high < 0))
        changes.append(Difference(now.name, earlier, after, changed))
    return SideBySide(task, changes, _sentences(new, old, task, changes, drawn is not None))


def _paired_replicates(new: Comparison, old: Comparison, names: Sequence[str]) -> Array | None:
    """Return the differences of both comparisons' replicates, (M, B); None if they are not of the same items."""
    now, then = new.replicates, old.replicates
    if now is None or then is None or now.drawn_from != then.drawn_from:
        return None
    if not set(names) <= now.scores.keys() & then.scores.keys():
        return None
    return np.array([np.subtract(now.scores[name], then.scores[name]) for name in names])


def _independent_widths(both: Sequence[tuple[Result, Result]], task: Measure) -> Array:
    """Return the widths of the intervals of differences below and above these, (2, M)."""

    def widths(pair: tuple[Result, Result]) -> tuple[float, float]:
        # An interval is around the corrected score, where there is one.
        now, then = (result.scores[task.name] for result in pair)
        return (
            math.hypot(now.best_guess - now.low, then.high - then.best_guess),
            math.hypot(now.high - now.best_guess, then.best_guess - then.low),
        )

    return np.transpose([widths(pair) for pair in both])


def _sentences(
    new: Comparison, old: Comparison, task: Measure, changes: Sequence[Difference], paired: bool
) -> list[str]:
    changed = [change for change in changes if not change.difference.tied]
    results = f"{len(changes)} result{'' if len(changes) == 1 else 's'}"
    largest = max(changed or changes, key=lambda change: abs(change.difference.value))
    sign = "+" if largest.difference.value > 0 else ""
    by = f"{largest.name} by {sign}{task.show_with_interval(largest.difference)}"
    if changed:
        first = f"{len(changed)} of {results} changed beyond the interval, most of all {by}."
    else:
        first = f"Nothing changed beyond the interval, of {results}; most of all {by}."
    if paired:
        how = f"The intervals are paired: both comparisons are of the same {task.unit}."
    elif new.replicates is None or old.replicates is None:
        how = "The intervals are not paired: one comparison has no replicates."
    else:
        how = f"The intervals are not paired: the {task.unit} or their splits differ, which may be what changed."
    now, then = (comparison.use or "none" for comparison in (new, old))
    return [first, how, f"To use: {now}, as before." if now == then else f"To use: {now}; before: {then}."]
