"""Pictures of a report: the axis of its forest plot, and score against cost. Lengths are in points.

They are drawn without a display, and without pyplot's global state.
"""

from __future__ import annotations

import math
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ..evaluation.tasks import Measure
from ..recipes.recipe import TF_IDF
from .results import Comparison, Result, has_number, rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox


BLUE = "#2a6fbb"
ORANGE = "#d9661f"
GREY = "#9a9a9a"
PALE = "#94b8e0"
INK = "#1f2328"
MUTED = "#59636e"
GRID = "#e4e4e4"
SURFACE = "#ffffff"

_MARKERS = "os^DvP"
#: Steps between ticks: these times a power of ten.
_ROUND = (1, 2, 5, 10)
#: Places of a name at its point, the best first: to the right and up, and its alignment.
_Place = tuple[float, float, str, str]
_PLACES: Sequence[_Place] = (
    (8, 0, "left", "center"), (-8, 0, "right", "center"), (6, 6, "left", "bottom"), (6, -6, "left", "top"),
    (-6, 6, "right", "bottom"), (-6, -6, "right", "top"),
)  # fmt: skip


@contextmanager
def drawing_style(size: float = 11) -> Iterator[None]:
    """Set fonts and colours of the figures; text is never a formula.

    Args:
        size: Size of the text, in points.
    """
    from matplotlib import rc_context

    settings: Any = {
        # A browser may have none of matplotlib's own fonts.
        "font.family": ["DejaVu Sans", "sans-serif"],
        "font.size": size,
        "axes.edgecolor": GREY,
        "axes.labelcolor": MUTED,
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
        # The browser, which sets the SVG, may have the character.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def freeze(figure: Figure) -> None:
    """Lay a figure out now, and once."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)


def printable(text: str, limit: int = 60) -> str:
    """Return a text on one line, without control characters, which an SVG cannot hold.

    Args:
        text: Anything.
        limit: Most characters; a longer text ends in an ellipsis.
    """
    clean = "".join(" " if unicodedata.category(character) in ("Cc", "Cs", "Cn") else character for character in text)
    line = " ".join(clean.split())
    return line if len(line) <= limit else f"{line[: limit - 1].rstrip()}…"


def timed(comparison: Comparison) -> list[Result]:
    """Return the recipes that have a cost and a score on the first task."""
    own = [result for result in comparison.results if not result.control]
    return [result for result in own if result.cost is not None and has_number(result, comparison.tasks[0])]


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


def round_axis(comparison: Comparison) -> tuple[Callable[[float], float], list[str]]:
    """Return the axis of the first task's scores: the place of a value, in percent, and evenly spread ticks."""
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
    """Return the timed results that nothing cheaper equals or beats, the cheapest first."""
    costly = [(result.cost, rank(result, task), result) for result in results if result.cost is not None]
    front: list[Result] = []
    for _, place, result in sorted(costly, key=lambda entry: entry[:2]):
        if place < (rank(front[-1], task) if front else math.inf):
            front.append(result)
    return front


def cost_figure(comparison: Comparison) -> Figure:
    """Draw cost against the first task's score, with intervals and the Pareto front; controls are lines.

    Args:
        comparison: A recipe of it at least must have both a cost and a score.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
    from matplotlib.transforms import Bbox

    task, choice, results = comparison.tasks[0], comparison.choice(), timed(comparison)
    front = pareto_front(results, task)
    points = {result.name: (result.cost or 0.0, result.scores[task.name].value * task.scale) for result in results}
    colours = {each.name: BLUE if each.scores[task.name].tied else PALE for each in results}
    colours[choice.name] = ORANGE
    markers = dict(zip(dict.fromkeys(result.pooling for result in results), _MARKERS * len(results), strict=False))

    # Narrow, so that names can be read where a page is 390 pixels wide.
    figure = Figure(figsize=(430 / 72, 360 / 72), dpi=144, layout="constrained")
    # Names are measured before anything is saved.
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
        if score.corrected is not None:
            axes.plot([x], [score.corrected * task.scale], "_", color=colour, markersize=10, zorder=2)
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

    # Where there is no room, later names are left out.
    results.sort(key=lambda result: (result is not choice, result not in front, rank(result, task)))
    pixels = axes.transData.transform(list(points.values()))
    taken = [Bbox.from_extents(x - 9, y - 9, x + 9, y + 9) for x, y in pixels]
    for result in results:
        text = f"{printable(result.recipe, 38)}, {printable(result.pooling, 14)}"
        style = {"color": INK, "fontweight": "bold" if result is choice else "normal"}
        _name(axes, fill(text, 22), points[result.name], _PLACES, taken, **style)
    for level in controls:
        at = (axes.get_xlim()[1], level.scores[task.name].value * task.scale)
        places = [(-2, 2, "right", "bottom"), (-2, -2, "right", "top")]
        _name(axes, fill(printable(level.in_words), 30), at, places, taken, color=MUTED)
    return figure


def _cost_axis(axes: Axes, costs: Sequence[float]) -> None:
    """Set the axis of costs, logarithmic if recipes lie far apart, with room for names."""
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


def _name(
    axes: Axes, text: str, at: tuple[float, float], places: Sequence[_Place], taken: list[Bbox], **style: Any
) -> None:
    """Write a name at the first of these places where it covers nothing; nowhere if there is none.

    Args:
        axes: The axes.
        text: The name.
        at: The point.
        places: Places at the point.
        taken: Boxes not to be covered, in pixels, of points and names; this one is added.
        **style: Style of the text.
    """
    for x, y, side, height in places:
        placed = axes.annotate(
            text, at, (x, y), textcoords="offset points", ha=side, va=height, fontsize="small",
            bbox={"facecolor": SURFACE, "edgecolor": "none", "alpha": 0.75, "pad": 0.5}, **style,
        )  # fmt: skip
        box = placed.get_window_extent()
        inside = all(axes.bbox.contains(*corner) for corner in box.corners())
        if inside and not any(box.overlaps(other) for other in taken):
            taken.append(box)
            return
        placed.remove()
