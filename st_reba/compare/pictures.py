"""Places in the pictures of a report: on the axis of scores, and on that of costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..evaluation.tasks import Measure
from ..recipes.recipe import TF_IDF
from .results import Comparison, Result, has_number, rank

#: From a value to its place on an axis, in percent; and the values and texts of the ticks.
Axis = tuple[Callable[[float], float], list[tuple[float, str]]]

# Most steps between ticks; a step is one of these times a power of ten.
_STEPS = 6
_ROUND = (1, 2, 5)


def levels(comparison: Comparison) -> list[Result]:
    """Return the strongest control of each sort on the first task, the best first."""
    task = comparison.tasks[0]
    untrained = {result.name for result in comparison.on_random_weights.values()}
    strongest: dict[str, Result] = {}
    for result in sorted(comparison.results, key=lambda result: rank(result, task)):
        if result.control and has_number(result, task):
            sort = "random" if result.name in untrained else TF_IDF if result.recipe == TF_IDF else "bag"
            strongest.setdefault(sort, result)
    return list(strongest.values())


def pareto_front(results: Iterable[Result], task: Measure) -> list[Result]:
    """Return the timed results that nothing cheaper equals or beats, the cheapest first."""
    costly = [(result.cost, rank(result, task), result) for result in results if result.cost is not None]
    front: list[Result] = []
    for _, place, result in sorted(costly, key=lambda entry: entry[:2]):
        if place < (rank(front[-1], task) if front else math.inf):
            front.append(result)
    return front


def score_axis(comparison: Comparison) -> Axis:
    """Return the axis of the first task's scores and their intervals, from tick to tick."""
    task = comparison.tasks[0]
    scores = [result.scores[task.name] for result in comparison.results if has_number(result, task)]
    ends = [task.scale * end for score in scores for end in (score.low, score.value, score.high) if math.isfinite(end)]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    high = high if high > low else low + 1
    powers = range(math.floor(math.log10(high - low)) - 1, 309)
    steps = (part * 10.0**power for power in powers for part in _ROUND)
    step = next(step for step in steps if (high - low) / step <= _STEPS)
    first, last = math.floor(low / step), math.ceil(high / step)

    def place(value: float) -> float:
        return 100 * (value * task.scale / step - first) / (last - first)

    ticks = [number * step for number in range(first, last + 1)]
    return place, [(tick / task.scale, f"{tick:g}".replace("-", "\N{MINUS SIGN}")) for tick in ticks]


def cost_axis(costs: Sequence[float]) -> Axis:
    """Return the logarithmic axis of costs above 0, with room for names at both ends."""
    low, high = math.log10(min(costs)), math.log10(max(costs))
    margin = max(0.1, 0.2 * (high - low))

    def place(cost: float) -> float:
        return 100 * (math.log10(cost) - low + margin) / (high - low + 2 * margin)

    powers = range(math.floor(low) - 1, math.ceil(high) + 1)
    ticks = [part * 10.0**power for power in powers for part in _ROUND]
    return place, [(tick, f"{tick:g}\N{MULTIPLICATION SIGN}") for tick in ticks if 0 <= place(tick) <= 100]


def apart(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names of points, both coordinates in percent, that can be written without covering an earlier one."""
    named: list[str] = []
    for name, (x, y) in points.items():
        if all(abs(x - points[other][0]) > 40 or abs(y - points[other][1]) > 6 for other in named):
            named.append(name)
    return named
