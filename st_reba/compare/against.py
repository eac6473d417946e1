"""Two comparisons side by side: whether a new model, prompt or version changed anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..evaluation.bootstrap import Estimate, interval
from ..evaluation.tasks import Measure
from .results import Comparison, Result, has_number


@dataclass(frozen=True)
class Difference:
    """What one recipe scored before, what it scores now, and the difference.

    Attributes:
        name: Of the result, in both.
        old: Its score before.
        new: Its score now.
        difference: The new one less the old one, with its 95% interval; tied if that holds 0.
    """

    name: str
    old: Estimate
    new: Estimate
    difference: Estimate


@dataclass(frozen=True)
class SideBySide:
    """What two comparisons have in common.

    Attributes:
        task: What decides in the new one.
        changes: Of the recipes and controls that both have, in the new one's order.
        paired: Whether the differences are of the same items.
        says: What changed, in sentences: whether anything did, how that was told, and what the answers were.
    """

    task: Measure
    changes: list[Difference]
    paired: bool
    says: list[str]


def side_by_side(new: Comparison, old: Comparison) -> SideBySide:
    """Hold a comparison against an older one.

    Where both kept replicates of the same items, the differences are paired. Else they are those of two samples that
    have nothing to do with each other, whose intervals are combined by the squares of their halves, each on its side
    (Zou and Donner, 2008):

    .. math:: d - \\sqrt{(x - l_x)^2 + (u_y - y)^2}, \\quad d + \\sqrt{(u_x - x)^2 + (y - l_y)^2}, \\quad d = x - y

    Args:
        new: What is asked about.
        old: What it is held against.

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
    paired = (
        new.replicates is not None
        and old.replicates is not None
        and new.replicates.drawn_from == old.replicates.drawn_from
    )
    changes = [_change(now, then, new, old, paired) for now, then in both]
    return SideBySide(task, changes, paired, _says(new, old, task, changes, paired))


def _change(now: Result, then: Result, new: Comparison, old: Comparison, paired: bool) -> Difference:
    after, before = now.scores[new.tasks[0].name], then.scores[new.tasks[0].name]
    value = after.value - before.value
    if paired and new.replicates is not None and old.replicates is not None:
        drawn = np.subtract(new.replicates.scores[now.name], old.replicates.scores[then.name])
        low, high = (value + float(end) for end in interval(drawn - np.nanmean(drawn)))
    else:
        low = value - math.hypot(after.value - after.low, before.high - before.value)
        high = value + math.hypot(after.high - after.value, before.value - before.low)
    # Without an interval nothing can be told.
    return Difference(now.name, before, after, Estimate(value, low, high, tied=not (low > 0 or high < 0)))


def _says(new: Comparison, old: Comparison, task: Measure, changes: Sequence[Difference], paired: bool) -> list[str]:
    changed = [change for change in changes if not change.difference.tied]
    results = f"{len(changes)} result{'' if len(changes) == 1 else 's'}"
    largest = max(changed or changes, key=lambda change: abs(change.difference.value))
    sign = "+" if largest.difference.value > 0 else ""
    by = f"{largest.name} by {sign}{task.show_with_interval(largest.difference)}"
    if not changed:
        first = f"Nothing changed beyond the interval, of {results}; most of all {by}."
    else:
        first = (
            f"{len(changed)} of {results} changed beyond the interval, most of all {by}. Of "
            "twenty that stay the same about one does so by chance."
        )
    if paired:
        how = f"The intervals are paired: both comparisons are of the same {task.unit}."
    elif new.replicates is None or old.replicates is None:
        how = "The intervals are not paired: one comparison kept no replicates."
    else:
        how = f"The intervals are not paired: the {task.unit} or their splits are others, which may be what changed."
    now, then = (comparison.use or "none" for comparison in (new, old))
    return [first, how, f"To use: {now}, as before." if now == then else f"To use: {now}; before: {then}."]
