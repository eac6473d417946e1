"""The pictures of a report: the axis of its forest plot, and score against cost. Lengths are in points.

They are drawn without a display, and without pyplot's global state.
"""

from __future__ import annotations

import math
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ..evaluation.tasks import Measure
from ..recipes.recipe import TF_IDF
from .results import Comparison, Result, has_number, rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BLUE = "#2a6fbb"
ORANGE = "#d9661f"
GREY = "#9a9a9a"
PALE = "#94b8e0"
INK = "#1f2328"
MUTED = "#59636e"
GRID = "#e4e4e4"
SURFACE = "#ffffff"

_FALLBACKS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "PingFang SC", "Hiragino Sans GB", "Heiti SC",
    "Microsoft YaHei", "SimHei", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Arial Unicode MS",
)  # fmt: skip


@contextmanager
def drawing_style(size: float = 11) -> Iterator[None]:
    """Fonts and colours of a report's figures: text is text (no formulas), in any script there is a font for.

    Args:
        size: Of the text, in points.
    """
    from matplotlib import rc_context

    settings: Any = {
        # Where an SVG is shown there may be none of them.
        "font.family": [*_families(), "sans-serif"],
        "font.size": size,
        "axes.titlesize": size + 1,
        "axes.edgecolor": GREY,
        "axes.labelcolor": MUTED,
        "axes.titlecolor": INK,
        "axes.unicode_minus": True,
        "legend.fontsize": size - 1,
        "legend.labelcolor": MUTED,
        "svg.fonttype": "none",
        # The same page each time.
        "svg.hashsalt": "st_reba",
        "text.color": INK,
        "text.parse_math": False,
        "xtick.color": GREY,
        "xtick.labelcolor": MUTED,
        "ytick.color": GREY,
        "ytick.labelcolor": MUTED,
    }
    with rc_context(settings), warnings.catch_warnings():
        # An SVG is set by the browser, which has other fonts; elsewhere `drawable` has its say.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def freeze(figure: Figure) -> None:
    """Lay a figure out now, and once: what is drawn later moves nothing."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)


def drawable(text: str) -> str:
    """The text with each run of characters that no installed font has as one ellipsis, instead of empty boxes."""
    known = _characters()
    shown = ""
    for character in text:
        if ord(character) in known or character == "\n":
            shown += character
        elif not shown.endswith("…"):
            shown += "…"
    return shown


def printable(text: str, limit: int = 60) -> str:
    """The text as a figure has room for it: on one line, without control characters, which an SVG cannot hold.

    Args:
        text: Anything.
        limit: Characters, at most; what is longer ends in an ellipsis.
    """
    clean = "".join(" " if unicodedata.category(character) in ("Cc", "Cs", "Cn") else character for character in text)
    line = " ".join(clean.split())
    return line if len(line) <= limit else f"{line[: limit - 1].rstrip()}…"


@lru_cache(maxsize=1)
def _families() -> list[str]:
    """matplotlib's own font and those for other scripts that are installed here."""
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return ["DejaVu Sans", *(family for family in _FALLBACKS if family in installed)]


@lru_cache(maxsize=1)
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(code for family in _families() for code in get_font(findfont(family)).get_charmap())


_MARKERS = "os^DvP"
#: Steps between ticks: these times a power of ten.
_ROUND = (1, 2, 5, 10)
_Place = tuple[float, float, str, str]
#: Where a name may stand at its point, the best place first: to the right and up, and how it is aligned there.
_PLACES: Sequence[_Place] = (
    (8, 0, "left", "center"), (-8, 0, "right", "center"), (6, 6, "left", "bottom"), (6, -6, "left", "top"),
    (-6, 6, "right", "bottom"), (-6, -6, "right", "top"),
)  # fmt: skip


def timed(comparison: Comparison) -> list[Result]:
    """The recipes that have a cost and a score on the first task."""
    own = [result for result in comparison.results if not result.control]
    return [result for result in own if result.cost is not None and has_number(result, comparison.tasks[0])]


def levels(comparison: Comparison) -> list[Result]:
    """The strongest control of each sort on the first task, the best first."""
    task = comparison.tasks[0]
    untrained = {result.name for result in comparison.on_random_weights.values()}
    strongest: dict[str, Result] = {}
    for result in sorted(comparison.results, key=lambda result: rank(result, task)):
        if result.control and has_number(result, task):
            sort = "random" if result.name in untrained else TF_IDF if result.recipe == TF_IDF else "bag"
            strongest.setdefault(sort, result)
    return list(strongest.values())


def round_axis(comparison: Comparison) -> tuple[Callable[[float], float], list[str]]:
    """The axis of the first task's scores: where a value stands on it, in percent, and its ticks, evenly spread."""
    from matplotlib.ticker import MaxNLocator

    task = comparison.tasks[0]
    scores = [result.scores[task.name] for result in comparison.results if has_number(result, task)]
    ends = [task.scale * end for score in scores for end in (score.low, score.value, score.high) if math.isfinite(end)]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    ticks = MaxNLocator(nbins=5, steps=_ROUND).tick_values(low, high if high > low else low + 1)

    def place(value: float) -> float:
        return float(100 * (value * task.scale - ticks[0]) / (ticks[-1] - ticks[0]))

    return place, [f"{tick:g}".replace("-", "\N{MINUS SIGN}") for tick in ticks]


def pareto_front(results: Iterable[Result], task: Measure) -> list[Result]:
    """Those that nothing cheaper equals or beats, from the cheapest to the dearest, of those that were timed."""
    costly = [(result.cost, rank(result, task), result) for result in results if result.cost is not None]
    front: list[Result] = []
    for _, place, result in sorted(costly, key=lambda entry: entry[:2]):
        if place < (rank(front[-1], task) if front else math.inf):
            front.append(result)
    return front


def cost_figure(comparison: Comparison) -> Figure:
    """Cost against the first task's score, with intervals and the Pareto front; controls are levels to be beaten.

    Args:
        comparison: A recipe of it at least must have both a cost and a score.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    task, choice, results = comparison.tasks[0], comparison.choice(), timed(comparison)
    front = pareto_front(results, task)
    points = {result.name: (result.cost or 0.0, result.scores[task.name].value * task.scale) for result in results}
    colours = {each.name: BLUE if each.scores[task.name].tied else PALE for each in results}
    colours[choice.name] = ORANGE
    markers = dict(zip(dict.fromkeys(result.pooling for result in results), _MARKERS * len(results), strict=False))

    # Narrow, so that names can be read where a page is 390 pixels wide.
    figure = Figure(figsize=(430 / 72, 360 / 72), dpi=144, layout="constrained")
    # Names have a measured size before anything is saved.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.8)
    _cost_axis(axes, [result.cost for result in results if result.cost is not None])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=_ROUND))
    axes.set_ylabel(printable(f"{task.name}: {task.metric}"))

    controls = levels(comparison)
    dashed: dict[str, Any] = {"color": GREY, "linewidth": 1.2, "linestyle": "--"}
    for level in controls:
        axes.axhline(level.scores[task.name].value * task.scale, **dashed)
    steps: dict[str, Any] = {"color": BLUE, "linewidth": 1.2}
    if len(front) > 1:
        corners = zip(*(points[each.name] for each in front), strict=True)
        axes.plot(*corners, drawstyle="steps-post", zorder=1.5, **steps)
    for result in results:
        (x, y), score, colour = points[result.name], result.scores[task.name], colours[result.name]
        ends = [score.low * task.scale, score.high * task.scale]
        axes.plot([x, x], ends, color=colour, linewidth=1.2, alpha=0.55, zorder=2)
        size, above = (10, 4) if result is choice else (7, 3)
        dot: dict[str, Any] = {"markersize": size, "markeredgecolor": SURFACE, "zorder": above}
        axes.plot([x], [y], markers[result.pooling], color=colour, **dot)

    square: dict[str, Any] = {"linestyle": "none", "marker": "s", "markersize": 7, "markeredgecolor": SURFACE}
    meanings = {
        ORANGE: "to use" if comparison.use else "best",
        BLUE: "cannot be told from the best",
        PALE: "worse",
    }
    shown = {colours[result.name] for result in results}
    key = [(Line2D([], [], color=colour, **square), what) for colour, what in meanings.items() if colour in shown]
    for pooling, marker in markers.items() if len(markers) > 1 else ():
        hollow = {**square, "marker": marker, "color": "none", "markeredgecolor": MUTED}
        key.append((Line2D([], [], **hollow), printable(pooling, 14)))
    if len(front) > 1:
        key.append((Line2D([], [], **steps), "Pareto front"))
    if any(result.control for result in comparison.results):
        key.append((Line2D([], [], **dashed), "controls, to be beaten"))
    beside: dict[str, Any] = {"frameon": False, "handlelength": 1.6, "columnspacing": 1.4}
    figure.legend(*zip(*key, strict=True), loc="outside lower left", ncols=3, **beside)
    freeze(figure)

    # The most telling first: where there is no room, a name is left out.
    results.sort(key=lambda result: (result is not choice, result not in front, rank(result, task)))
    _name_points(axes, results, points, controls, choice, task)
    return figure


def _cost_axis(axes: Axes, costs: Sequence[float]) -> None:
    """From the cheapest to the dearest with room for names, on a logarithmic scale if recipes lie far apart."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = min(costs), max(costs)
    if low > 0 and high > 8 * low:
        margin = (high / low) ** 0.2
        axes.set_xscale("log")
        axes.set_xlim(low / margin, high * margin)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,), numticks=20))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        margin = 0.3 * (high - low) or 0.5
        axes.set_xlim(max(0, low - margin) or -0.04 * high, high + margin)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=_ROUND))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda cost, _: f"{cost:g}×"))
    axes.set_xlabel("time as a multiple of the classical embedding's")


def _name_points(
    axes: Axes,
    results: Sequence[Result],
    points: dict[str, tuple[float, float]],
    controls: Sequence[Result],
    choice: Result,
    task: Measure,
) -> None:
    """Names at their points and levels, none over another or over a point, nor beyond the axes.

    Where there is no such place, the name is left out: the forest plot has all of them. A line is covered only for the
    name of a recipe that is to use, on the front, or tied with the best.
    """
    from matplotlib.transforms import Bbox

    def seen(first: tuple[float, float], last: tuple[float, float], margin: float) -> Bbox:
        """Where a line between two points is seen."""
        (left, low), (right, high) = axes.transData.transform([first, last])
        return Bbox.from_extents(left - margin, min(low, high) - margin, right + margin, max(low, high) + margin)

    taken, lines = [seen(point, point, 9) for point in points.values()], []
    for result in results:
        score, (x, _) = result.scores[task.name], points[result.name]
        if math.isfinite(score.low) and math.isfinite(score.high):
            lines.append(seen((x, score.low * task.scale), (x, score.high * task.scale), 2))
    front = pareto_front(results, task)
    for one, other in pairwise(front):
        (x, y), (x_end, y_end) = points[one.name], points[other.name]
        lines += [seen((x, y), (x_end, y), 2), seen((x_end, y), (x_end, y_end), 2)]
    left, right = axes.get_xlim()
    heights = {control.name: control.scores[task.name].value * task.scale for control in controls}
    lines += [seen((left, height), (right, height), 1) for height in heights.values()]

    def name(text: str, at: tuple[float, float], places: Sequence[_Place], over_lines: bool, **style: Any) -> None:
        for kept_free in ([*taken, *lines], taken) if over_lines else ([*taken, *lines],):
            for x, y, side, height in places:
                placed = axes.annotate(
                    text, at, (x, y), textcoords="offset points", ha=side, va=height, fontsize="small",
                    bbox={"facecolor": SURFACE, "edgecolor": "none", "alpha": 0.75, "pad": 0.5}, **style,
                )  # fmt: skip
                box = placed.get_window_extent()
                inside = all(axes.bbox.contains(*corner) for corner in box.corners())
                if inside and not any(box.overlaps(other) for other in kept_free):
                    taken.append(box)
                    return
                placed.remove()

    for result in results:
        telling = result is choice or result in front or result.scores[task.name].tied
        weight = "bold" if result is choice else "normal"
        text = fill(f"{printable(result.recipe, 38)}, {printable(result.pooling, 14)}", 22)
        name(text, points[result.name], _PLACES, telling, color=INK, fontweight=weight)
    for control in controls:
        above_or_below = [(-2, 2, "right", "bottom"), (-2, -2, "right", "top")]
        text, at = fill(printable(control.in_words), 30), (right, heights[control.name])
        name(text, at, above_or_below, over_lines=False, color=MUTED)
