"""The figures of a comparison. Lengths are in points; on a page, one point is about one pixel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ...evaluation.drawing import BLUE, GREY, GRID, INK, MUTED, ORANGE, PALE, SURFACE, printable
from ...evaluation.tasks import Measure
from ...optional import require
from ...recipes.recipe import TF_IDF
from ..results import Comparison, Result, best_of, has_number, pareto_front, rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^DvP"
_ROW_HEIGHT = 17
# Beside the plane of costs and scores there is room for so many names.
_NAMED = 10


def cost_figure(comparison: Comparison) -> Figure:
    """Cost against the first task's score, with intervals and the Pareto front; controls are levels to be beaten.

    Args:
        comparison: A recipe of it at least must have both a cost and a score.
    """
    task, choice = comparison.tasks[0], comparison.choice()
    timed = [
        result
        for result in comparison.results
        if not result.control and result.cost is not None and has_number(result, task)
    ]
    front = pareto_front(timed, task)
    poolings = list(dict.fromkeys(result.pooling for result in timed))
    figure, axes = _axes(660, 410)
    axes.grid(color=GRID, linewidth=0.8)
    _cost_axis(axes, timed)
    axes.set_ylabel(_quantity(task, named=True))

    levels = _levels(comparison, task)
    for level in levels:
        axes.axhline(_shown(level, task), color=GREY, linewidth=1.2, linestyle="--")
    if len(front) > 1:
        steps = [_point(result, task) for result in front]
        axes.plot(*zip(*steps, strict=True), drawstyle="steps-post", color=BLUE, linewidth=1.2, zorder=1.5)
    for result in timed:
        marker = _MARKERS[poolings.index(result.pooling) % len(_MARKERS)]
        _dot(axes, result, task, _colour(result, choice, task), marker, large=result is choice)
    _key(figure, _cost_key(comparison, timed, poolings, front), columns=5)

    # The most telling first: not all may be named.
    ahead = {result.name for result in front}
    timed.sort(key=lambda result: (result is not choice, result.name not in ahead, rank(result, task)))
    _names_beside(axes, timed[: _NAMED - len(levels)], levels, choice, task)
    return figure


def _levels(comparison: Comparison, task: Measure) -> list[Result]:
    """The strongest control of each sort."""
    untrained = {result.name for result in comparison.on_random_weights.values()}
    strongest: dict[str, Result] = {}
    for result in sorted(comparison.results, key=lambda result: rank(result, task)):
        if result.control and has_number(result, task):
            sort = "random" if result.name in untrained else TF_IDF if result.recipe == TF_IDF else "bag"
            strongest.setdefault(sort, result)
    return list(strongest.values())


def scores_figure(comparison: Comparison, task: Measure, rows: Sequence[Result]) -> Figure:
    """One task's scores as bars with intervals, beside chance and the best control.

    Args:
        comparison: What was found.
        task: One of its tasks.
        rows: Its results from top to bottom; one without a score keeps its place, so that figures can be compared.
    """
    figure, axes = _axes(440, _ROW_HEIGHT * len(rows) + 110)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_title(printable(task.name), loc="left", fontweight="bold")
    axes.set_xlabel(_quantity(task))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    best = best_of(comparison.results, task)
    for row, result in enumerate(rows):
        _row_name(axes, row, result, bold=result is best)
        if has_number(result, task):
            colour = _colour(result, best, task)
            axes.barh(row, _shown(result, task), height=0.72, color=colour)
    _intervals(axes, rows, task)
    axes.axvline(0, color=GREY, linewidth=0.8)
    key = _colour_key([result for result in rows if has_number(result, task)], best, task)
    if task.chance is not None:
        chance = axes.axvline(task.chance * task.scale, color=MUTED, linewidth=1.3, linestyle=":")
        key.append((chance, "chance"))
    if control := best_of(comparison.results, task, control=True):
        line = axes.axvline(_shown(control, task), color=GREY, linewidth=1.2, linestyle="--")
        key.append((line, "best control"))
    _key(figure, key, columns=3)
    return figure


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    require("matplotlib.figure", "report", "Drawing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=144, layout="constrained")
    # Names have a measured size before anything is saved.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _names_beside(
    axes: Axes, results: Sequence[Result], levels: Sequence[Result], choice: Result, task: Measure
) -> None:
    """Names in a column to the right, in the order of their heights, each with a line to its point or level."""
    points: list[tuple[Result, tuple[float, float], Any]] = [
        *((result, _point(result, task), axes.transData) for result in results),
        *((level, (1, _shown(level, task)), axes.get_yaxis_transform()) for level in levels),
    ]
    points.sort(key=lambda point: point[1][1])
    for place, (result, point, coordinates) in enumerate(points):
        axes.annotate(
            fill(printable(result.in_words) if result.control else _name(result), 30),
            xy=point,
            xycoords=coordinates,
            xytext=(1.04, (place + 0.5) / len(points)),
            textcoords="axes fraction",
            verticalalignment="center",
            fontsize="small",
            fontweight="bold" if result is choice else "normal",
            color=MUTED if result.control else INK,
            arrowprops={
                "arrowstyle": "-", "color": GREY, "linewidth": 0.6, "relpos": (0, 0.5),
                "shrinkB": 0 if result.control else 5,
            },
        )  # fmt: skip


def _cost_axis(axes: Axes, timed: Sequence[Result]) -> None:
    """From the cheapest to the dearest with room for labels, on a logarithmic scale if recipes lie far apart."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    costs = [_cost(result) for result in timed]
    low, high = min(costs), max(costs)
    if low > 0 and high > 8 * low:
        margin = (high / low) ** 0.12
        axes.set_xscale("log")
        axes.set_xlim(low / margin, high * margin)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,), numticks=20))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        margin = 0.15 * (high - low) or 0.5
        axes.set_xlim(max(0, low - margin) or -0.04 * high, high + margin)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda cost, _: f"{cost:g}×"))
    axes.set_xlabel("time as a multiple of the classical embedding's")


def _dot(axes: Axes, result: Result, task: Measure, colour: str, marker: str, large: bool) -> None:
    estimate = result.scores[task.name]
    x, y = _point(result, task)
    ends = [estimate.low * task.scale, estimate.high * task.scale]
    axes.plot([x, x], ends, color=colour, linewidth=1.2, alpha=0.55, zorder=2)
    axes.plot(
        [x], [y], marker,
        color=colour, markersize=10 if large else 7, markeredgecolor=SURFACE, zorder=4 if large else 3,
    )  # fmt: skip


def _intervals(axes: Axes, rows: Sequence[Result], task: Measure) -> None:
    known = [(row, result.scores[task.name]) for row, result in enumerate(rows) if has_number(result, task)]
    ends = [(row, estimate.low * task.scale, estimate.high * task.scale) for row, estimate in known]
    if ends:
        axes.hlines(*zip(*ends, strict=True), color=INK, linewidth=1.1, zorder=3)


def _row_name(axes: Axes, row: int, result: Result, bold: bool) -> None:
    axes.text(
        -0.015,
        row,
        _name(result),
        transform=axes.get_yaxis_transform(),
        horizontalalignment="right",
        verticalalignment="center",
        fontsize="small",
        fontweight="bold" if bold else "normal",
        color=MUTED if result.control else INK,
    )


def _colour(result: Result, best: Result | None, task: Measure) -> str:
    if result.control:
        return GREY
    if result is best:
        return ORANGE
    return BLUE if result.scores[task.name].tied else PALE


def _colour_key(
    results: Sequence[Result], best: Result | None, task: Measure, first: str = "best"
) -> list[tuple[Any, str]]:
    """What the colours that occur mean."""
    from matplotlib.lines import Line2D

    names = {ORANGE: first, BLUE: "cannot be told from the best", PALE: "worse", GREY: "control"}
    found = {_colour(result, best, task) for result in results}
    style: dict[str, Any] = {"linestyle": "none", "marker": "s", "markersize": 7, "markeredgecolor": SURFACE}
    return [(Line2D([], [], color=colour, **style), name) for colour, name in names.items() if colour in found]


def _cost_key(
    comparison: Comparison, timed: Sequence[Result], poolings: Sequence[str], front: Sequence[Result]
) -> list[tuple[Any, str]]:
    from matplotlib.lines import Line2D

    key = _colour_key(timed, comparison.choice(), comparison.tasks[0], "to use" if comparison.use else "best")
    if len(poolings) > 1:
        hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "none", "markeredgecolor": MUTED}
        key += [
            (Line2D([], [], marker=_MARKERS[index % len(_MARKERS)], markersize=7, **hollow), printable(pooling, 14))
            for index, pooling in enumerate(poolings)
        ]
    if len(front) > 1:
        key.append((Line2D([], [], color=BLUE, linewidth=1.2), "Pareto front"))
    if any(result.control for result in comparison.results):
        key.append((Line2D([], [], color=GREY, linewidth=1.2, linestyle="--"), "controls, to be beaten"))
    return key


def _key(figure: Figure, entries: Sequence[tuple[Any, str]], columns: int) -> None:
    handles, names = zip(*entries, strict=True) if entries else ((), ())
    figure.legend(
        handles, names, loc="outside lower left", ncols=columns, frameon=False, handlelength=1.6, columnspacing=1.4
    )


def _name(result: Result) -> str:
    """Recipe and pooling, both of them to be seen however long they are."""
    return f"{printable(result.recipe, 38)}, {printable(result.pooling, 14)}"


def _quantity(task: Measure, named: bool = False) -> str:
    parts = [f"{task.name}: {task.metric}" if named else task.metric]
    if not task.greater_is_better:
        parts.append("lower is better")
    if task.proxy:
        parts.append("a proxy")
    return ", ".join(printable(part) for part in parts)


def _point(result: Result, task: Measure) -> tuple[float, float]:
    return _cost(result), _shown(result, task)


def _cost(result: Result) -> float:
    return math.nan if result.cost is None else result.cost


def _shown(result: Result, task: Measure) -> float:
    return result.scores[task.name].value * task.scale
