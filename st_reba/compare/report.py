"""What a comparison found, written down: a page with its figure, its numbers as CSV, and the recipe to use as a model.

The page is HTML that needs nothing else. Lengths in its figure are in points; on a page, one point is about one pixel.
"""

from __future__ import annotations

import base64
import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from ..evaluation import drawing
from ..evaluation.drawing import drawable, drawing_style, printable
from ..evaluation.tasks import Measure
from ..files import atomic_directory
from ..hub import card
from ..optional import require
from ..recipes.recipe import TF_IDF, Recipe, device_of
from .recipes import Recipes
from .results import TIED, Comparison, Result, best_of, has_number, measured, rank, rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ASSETS = Path(__file__).parent.parent / "assets"
# So many recipes are shown on the page; the others are folded away.
_OPEN_ROWS = 15
# On a page with more tasks, random weights stand beside the first alone.
_FEW_TASKS = 3
_MARKERS = "os^DvP"
# Beside the plane of costs and scores there is room for so many names.
_NAMED = 10


def write_report(comparison: Comparison, directory: Path, called: str = "directory") -> Path:
    """Write ``report.html``, its figure ``cost.png``, the numbers as ``results.csv`` and all as ``comparison.json``.

    The page is complete in itself: it loads nothing and runs no script.

    Args:
        comparison: What to show.
        directory: Where; it must not exist yet, or be empty. It appears when everything is written.
        called: What the user knows the directory as, such as ``"--out"``.

    Returns:
        The page's path.

    Raises:
        ImportError: If Jinja2 or matplotlib is missing.
        ValueError: If something lies in the directory already, or there is no task.
        OSError: If it cannot be written.
    """
    require("matplotlib.figure", "report", "Drawing")
    require("jinja2", "report", "A report")
    if not comparison.tasks:
        raise ValueError("A comparison without tasks has nothing to show: give it at least one task.")
    with atomic_directory(directory, called) as scratch:
        write_csv(comparison, scratch / "results.csv")
        comparison.save(scratch / "comparison.json")
        (scratch / "report.html").write_text(_page(comparison, _draw(comparison, scratch)), encoding="utf-8")
    return directory / "report.html"


def write_results(comparison: Comparison, directory: Path, called: str = "directory") -> Path:
    """Write ``results.csv`` and ``comparison.json`` alone, which need neither Jinja2 nor matplotlib.

    Args:
        comparison: What to show.
        directory: As for :func:`write_report`.
        called: Likewise.

    Returns:
        The CSV file's path.

    Raises:
        ValueError: If something lies in the directory already.
        OSError: If it cannot be written.
    """
    with atomic_directory(directory, called) as scratch:
        write_csv(comparison, scratch / "results.csv")
        comparison.save(scratch / "comparison.json")
    return directory / "results.csv"


def write_csv(comparison: Comparison, path: Path) -> None:
    """Write one line a result, as measured and unrounded: what is not known is empty.

    The columns are recipe, pooling, control; value, low, high, tied of each task, and the value on random weights;
    texts_per_second, cost, same_as, read_at.
    """
    header = ["recipe", "pooling", "control"]
    for task in comparison.tasks:
        header += [task.name, *(f"{task.name} {part}" for part in ("low", "high", "tied", "random"))]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*header, "texts_per_second", "cost", "same_as", "read_at"])
        for row in rows(comparison):
            result = row.result
            line: list[object] = [result.recipe, result.pooling, result.control]
            for cell in row.cells:
                score, random = (None, None) if cell is None else (cell.score, cell.random)
                line += [""] * 4 if score is None else [score.value, score.low, score.high, score.tied]
                line.append("" if random is None else random.value)
            writer.writerow(
                [*line, result.sentences_per_second, result.cost, "; ".join(result.same_as), result.read_at]
            )


def recipe_is(recipe: Recipe, result: Result) -> bool:
    """Whether a recipe is what a result was made by: of its candidates the one that was taken on the first half."""
    wording = "" if recipe.wording is None else recipe.wording.template
    own = (recipe.candidate_of or recipe.result, recipe.key, wording, recipe.shares)
    return own == (result.name, result.spec, result.template, result.shares)


def save_best(comparison: Comparison, recipes: Recipes, out: Path) -> SentenceTransformer:
    """Write the recipe to use as a SentenceTransformer directory, with its scores on its card.

    That is what the answer names, or the best where it names none; or what a search had chosen on other texts. The card
    says which.

    Args:
        comparison: Says which recipe it is.
        recipes: What was compared.
        out: Directory to write; it must not exist yet, or be empty.

    Returns:
        The model, whose vectors are of length 1.

    Raises:
        ValueError: If the comparison had proxies only, or ``out`` holds something.
    """
    if comparison.tasks[0].proxy:
        raise ValueError("Without labels no recipe is known to be the best: use st-reba build to choose one yourself.")
    best = comparison.choice()
    recipe = next(recipe for recipe in recipes.all if recipe_is(recipe, best))
    # Fitted anew, as the build command does it, on what the second half was scored with.
    fitted = replace(recipe, fit_texts=recipe.fit_texts or recipes.fit_on[-1]) if recipe.fitted else recipe
    parts = list(fitted.model(recipes.backbone).children())
    device = device_of(recipes.backbone)
    model = SentenceTransformer(modules=[*parts, Normalize()], device=device, prompts=comparison.prompts or None)
    card.add_recipe(model, recipe.name, recipe.key, recipe.says, recipe.row.citation)
    controls = {control.name for control in best.controls}
    table = []
    for row in rows(comparison, [best, *(other for other in comparison.results if other.name in controls)]):
        line = [row.result.name]
        for task, cell in zip(comparison.tasks, row.cells, strict=True):
            shown = "" if cell is None else f"{task.show(cell.score.value)}{TIED if cell.tied else ''}"
            line.append(shown if cell is None else f"{shown} {task.show_interval(cell.score)}".rstrip())
        table.append(line)
    card.adopt(model).comparison = {
        "answer": comparison.answer,
        "data": comparison.data,
        "chosen_before": bool(comparison.chosen),
        "date": comparison.date,
        "command": comparison.command,
        "columns": [f"{task.name} ({task.metric})" for task in comparison.tasks],
        "rows": table,
        "verdict": comparison.verdict,
    }
    with atomic_directory(out, "--save-best") as scratch:
        model.save_pretrained(str(scratch))
    return model


def _page(comparison: Comparison, figure: dict[str, str] | None) -> str:
    """The page; ``figure`` is its address, which holds all of it, and what it shows in words."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    tasks, table = comparison.tasks, rows(comparison)
    own = [row for row in table if not row.result.control]
    few = len(tasks) <= _FEW_TASKS
    # Where no recipe has a number, none is to be used.
    choice = None if best_of(comparison.results, tasks[0]) is None else comparison.choice()
    intervals = [
        [cell.score for cell in cells if cell and tasks[number].show_interval(cell.score)]
        for number, cells in enumerate(zip(*(row.cells for row in table), strict=True))
    ]
    ends = [[end for score in column for end in (score.low, score.value, score.high)] for column in intervals]
    return environment.get_template("report.html.jinja").render(
        comparison=comparison,
        measured=measured,
        tied=TIED,
        choice=choice,
        rows=own[:_OPEN_ROWS],
        folded=own[_OPEN_ROWS:],
        controls=[row for row in table if row.result.control],
        few=few,
        random=[bool(comparison.on_random_weights) and (few or task is tasks[0]) for task in tasks],
        ranges=[(min(column), max(column) - min(column) or 1) if column else None for column in ends],
        timed=any(result.cost is not None for result in comparison.results),
        proxies=[task for task in tasks if task.proxy],
        descriptions={row.result.recipe: row.result.says for row in table if row.result.says},
        figure=figure,
    )


def _draw(comparison: Comparison, directory: Path) -> dict[str, str] | None:
    """Score against cost, if anything was timed: as a PNG beside the page, and in it as SVG."""
    from matplotlib.text import Text

    task = comparison.tasks[0]
    if not _timed(comparison):
        return None
    with drawing_style():
        figure = cost_figure(comparison)
        drawing.freeze(figure)
        # What the PNG's fonts lack, the browser's may have.
        buffer = io.StringIO()
        nothing: dict[str, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        for text in figure.findobj(Text):
            if isinstance(text, Text) and (shown := drawable(text.get_text())) != text.get_text():
                text.set_text(shown)
        figure.savefig(directory / "cost.png")
    choice = comparison.choice()
    at = "" if choice.cost is None else f" at {measured(choice.cost)} times the cost of the classical embedding"
    return {
        "address": f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue().encode()).decode()}",
        "alt": f"Scatter plot of cost against {task.name} for every recipe, with the controls as lines. {choice.name} "
        f"reaches {task.show(choice.scores[task.name].value)}{at}. The table holds all the numbers.",
    }


# The figure


def _timed(comparison: Comparison) -> list[Result]:
    task = comparison.tasks[0]
    own = [result for result in comparison.results if not result.control]
    return [result for result in own if result.cost is not None and has_number(result, task)]


def pareto_front(results: Iterable[Result], task: Measure) -> list[Result]:
    """Those that nothing cheaper equals or beats, from the cheapest to the dearest, of those that were timed."""
    timed = [(result.cost, rank(result, task), result) for result in results if result.cost is not None]
    front: list[Result] = []
    for _, place, result in sorted(timed, key=lambda entry: entry[:2]):
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

    task, choice, timed = comparison.tasks[0], comparison.choice(), _timed(comparison)
    front = pareto_front(timed, task)
    points = {result.name: (result.cost or 0.0, result.scores[task.name].value * task.scale) for result in timed}
    colours = {each.name: drawing.BLUE if each.scores[task.name].tied else drawing.PALE for each in timed}
    colours[choice.name] = drawing.ORANGE
    markers = dict(zip(dict.fromkeys(result.pooling for result in timed), _MARKERS * len(timed), strict=False))

    figure = Figure(figsize=(660 / 72, 410 / 72), dpi=144, layout="constrained")
    # Names have a measured size before anything is saved.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=drawing.GRID, linewidth=0.8)
    _cost_axis(axes, [result.cost for result in timed if result.cost is not None])
    proxy = [] if task.greater_is_better else ["lower is better"]
    quantity = [f"{task.name}: {task.metric}", *proxy, *(["a proxy"] if task.proxy else [])]
    axes.set_ylabel(", ".join(map(printable, quantity)))

    levels = _levels(comparison, task)
    dashed: dict[str, Any] = {"color": drawing.GREY, "linewidth": 1.2, "linestyle": "--"}
    for level in levels:
        axes.axhline(level.scores[task.name].value * task.scale, **dashed)
    steps: dict[str, Any] = {"color": drawing.BLUE, "linewidth": 1.2}
    if len(front) > 1:
        corners = zip(*(points[each.name] for each in front), strict=True)
        axes.plot(*corners, drawstyle="steps-post", zorder=1.5, **steps)
    for result in timed:
        (x, y), score, colour = points[result.name], result.scores[task.name], colours[result.name]
        ends = [score.low * task.scale, score.high * task.scale]
        axes.plot([x, x], ends, color=colour, linewidth=1.2, alpha=0.55, zorder=2)
        size, above = (10, 4) if result is choice else (7, 3)
        dot: dict[str, Any] = {"markersize": size, "markeredgecolor": drawing.SURFACE, "zorder": above}
        axes.plot([x], [y], markers[result.pooling], color=colour, **dot)

    square: dict[str, Any] = {"linestyle": "none", "marker": "s", "markersize": 7, "markeredgecolor": drawing.SURFACE}
    meanings = {
        drawing.ORANGE: "to use" if comparison.use else "best",
        drawing.BLUE: "cannot be told from the best",
        drawing.PALE: "worse",
    }
    shown = {colours[result.name] for result in timed}
    key = [(Line2D([], [], color=colour, **square), what) for colour, what in meanings.items() if colour in shown]
    for pooling, marker in markers.items() if len(markers) > 1 else ():
        hollow = {**square, "marker": marker, "color": "none", "markeredgecolor": drawing.MUTED}
        key.append((Line2D([], [], **hollow), printable(pooling, 14)))
    if len(front) > 1:
        key.append((Line2D([], [], **steps), "Pareto front"))
    if any(result.control for result in comparison.results):
        key.append((Line2D([], [], **dashed), "controls, to be beaten"))
    beside: dict[str, Any] = {"frameon": False, "handlelength": 1.6, "columnspacing": 1.4}
    figure.legend(*zip(*key, strict=True), loc="outside lower left", ncols=5, **beside)

    # The most telling first: not all may be named.
    timed.sort(key=lambda result: (result is not choice, result not in front, rank(result, task)))
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


def _cost_axis(axes: Axes, costs: Sequence[float]) -> None:
    """From the cheapest to the dearest with room for labels, on a logarithmic scale if recipes lie far apart."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

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


def _names_beside(
    axes: Axes, results: Sequence[Result], levels: Sequence[Result], choice: Result, task: Measure
) -> None:
    """Names in a column to the right, in the order of their heights, each with a line to its point or level."""
    named = sorted([*results, *levels], key=lambda result: result.scores[task.name].value)
    for place, result in enumerate(named):
        height = result.scores[task.name].value * task.scale
        name = f"{printable(result.recipe, 38)}, {printable(result.pooling, 14)}"
        line = {"arrowstyle": "-", "color": drawing.GREY, "linewidth": 0.6, "relpos": (0, 0.5)}
        axes.annotate(
            fill(printable(result.in_words) if result.control else name, 30),
            xy=(1, height) if result.control else (result.cost or 0, height),
            xycoords=axes.get_yaxis_transform() if result.control else axes.transData,
            xytext=(1.04, (place + 0.5) / len(named)),
            textcoords="axes fraction",
            verticalalignment="center",
            fontsize="small",
            fontweight="bold" if result is choice else "normal",
            color=drawing.MUTED if result.control else drawing.INK,
            arrowprops={**line, "shrinkB": 0 if result.control else 5},
        )
