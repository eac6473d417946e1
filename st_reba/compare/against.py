"""Two comparisons side by side: whether a new model, prompt or version changed anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..evaluation import bootstrap
from ..evaluation.bootstrap import Estimate, Resampled
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

    Where both kept what they measured on each item, and the items are the same, the differences are paired: the same
    items are resampled for both. Else they are those of two samples that have nothing to do with each other, whose
    intervals are combined by the squares of their halves, each on its side (Zou and Donner, 2008):

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
    items = _paired(new, old)
    changes = [_change(now, then, task, items) for now, then in both]
    return SideBySide(task, changes, items is not None, _says(new, old, task, changes, items is not None))


def _paired(new: Comparison, old: Comparison) -> Resampled | None:
    """The scores of both on the same items, by ``"new name"`` and ``"old name"``; None if the items differ."""
    if new.items is None or old.items is None or not new.items.data or new.items.data != old.items.data:
        return None
    if (new.items.kind, new.items.first) != (old.items.kind, old.items.first):
        return None
    values = {
        **{f"new {name}": own for name, own in new.items.values.items()},
        **{f"old {name}": own for name, own in old.items.values.items()},
    }
    return replace(new.items, values=values).items()


def _change(now: Result, then: Result, task: Measure, items: Resampled | None) -> Difference:
    new, old = now.scores[task.name], then.scores[task.name]
    value = new.value - old.value
    if items is not None and {f"new {now.name}", f"old {now.name}"} <= set(items.recipes):
        low, high = bootstrap.difference(items, f"new {now.name}", f"old {now.name}")
    else:
        low = value - math.hypot(new.value - new.low, old.high - old.value)
        high = value + math.hypot(new.high - new.value, old.value - old.low)
    # Where there is no interval nothing is told.
    return Difference(now.name, old, new, Estimate(value, low, high, tied=not (low > 0 or high < 0)))


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
    elif new.items is None or old.items is None:
        how = "The intervals are not paired: what each item gave was not kept."
    elif new.items.data == old.items.data:
        how = "The intervals are not paired: one is of all items at once, the other of two halves that choose in turn."
    else:
        how = f"The intervals are not paired: the {task.unit} are others, which may itself be what changed."
    now, then = (comparison.use or "none" for comparison in (new, old))
    return [first, how, f"To use: {now}, as before." if now == then else f"To use: {now}; before: {then}."]
