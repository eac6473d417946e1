"""A comparison as a page to look at: HTML that needs nothing else, its figures as PNG, its numbers as CSV."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...evaluation.drawing import drawable, drawing_style, freeze
from ...evaluation.tasks import Measure
from ...files import atomic_directory
from ...optional import require
from ..results import TIED, Comparison, Result, best_of, has_number, measured, rank
from .charts import cost_figure, scores_figure

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure

_ASSETS = Path(__file__).parent
# So many recipes are shown on the page; the others are folded away.
_OPEN_ROWS = 15
# On a page with more tasks, random weights stand beside the first alone.
_FEW_TASKS = 3


@dataclass(frozen=True)
class Cell:
    """One score as the table shows it.

    Attributes:
        value: Scaled.
        interval: In brackets; empty if there is none.
        best: Whether no recipe of its column is better; never for a control.
        tied: Whether it cannot be told from the best; never for a control.
        span: Low end, value and high end as percentages of the column's range; None without an interval.
        random: The same on random weights; empty where it was not run on them.
    """

    value: str
    interval: str
    best: bool
    tied: bool
    span: tuple[float, float, float] | None
    random: str = ""


@dataclass(frozen=True)
class ResultRow:
    """One result as the table shows it; ``cells`` has None where a task does not apply."""

    result: Result
    best: bool
    cells: list[Cell | None]


@dataclass(frozen=True)
class Drawing:
    """One figure: its file's stem, what it shows in words, and an address that holds all of it."""

    name: str
    alt: str
    address: str


def write_report(comparison: Comparison, directory: Path, called: str = "directory") -> Path:
    """Write ``report.html``, its figures as PNG files, the numbers as ``results.csv`` and all as ``comparison.json``.

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
        with drawing_style():
            drawings = {
                "cost": list(_cost_drawing(comparison, scratch)),
                "scores": list(_scores_drawings(comparison, scratch)),
            }
        page = _render(comparison, drawings)
        (scratch / "report.html").write_text(page, encoding="utf-8")
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
    texts_per_second, cost, same_as.
    """
    header = ["recipe", "pooling", "control"]
    for task in comparison.tasks:
        header += [task.name, *(f"{task.name} {part}" for part in ("low", "high", "tied", "random"))]
    random = comparison.on_random_weights
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*header, "texts_per_second", "cost", "same_as"])
        for result in _beside_random(comparison):
            line: list[object] = [result.recipe, result.pooling, result.control]
            for task in comparison.tasks:
                score = result.scores.get(task.name)
                line += [""] * 4 if score is None else [score.value, score.low, score.high, score.tied]
                untrained = random[result.name].scores.get(task.name) if result.name in random else None
                line.append("" if untrained is None else untrained.value)
            writer.writerow([*line, result.sentences_per_second, result.cost, "; ".join(result.same_as)])


def _beside_random(comparison: Comparison) -> list[Result]:
    """The results without those on random weights, which stand beside them."""
    beside = {result.name for result in comparison.on_random_weights.values()}
    return [result for result in comparison.results if result.name not in beside]


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.jinja")


def _render(comparison: Comparison, drawings: dict[str, list[Drawing]]) -> str:
    rows = _rows(comparison)
    own = [row for row in rows if not row.result.control]
    tasks, random = comparison.tasks, comparison.on_random_weights
    few = len(tasks) <= _FEW_TASKS
    described = {row.result.recipe: row.result for row in rows}
    return _template().render(
        comparison=comparison,
        measured=measured,
        tied=TIED,
        rows=own[:_OPEN_ROWS],
        folded=own[_OPEN_ROWS:],
        controls=[row for row in rows if row.result.control],
        few=few,
        random=[bool(random) and (few or task is tasks[0]) for task in tasks],
        intervals=any(cell and cell.interval for row in rows for cell in row.cells),
        timed=any(result.cost is not None for result in comparison.results),
        proxies=[task for task in tasks if task.proxy],
        descriptions=[(result.recipe, result.says) for result in described.values() if result.says],
        drawings=drawings,
        files=[
            "results.csv",
            "comparison.json",
            *(f"{drawing.name}.png" for group in drawings.values() for drawing in group),
        ],
    )


def _rows(comparison: Comparison) -> list[ResultRow]:
    """All results but those on random weights, the best on the first task first."""
    task = comparison.tasks[0]
    ordered = sorted(_beside_random(comparison), key=lambda result: rank(result, task))
    columns = [_column(comparison, task, ordered) for task in comparison.tasks]
    # Where no recipe has a number, none is to be used.
    choice = None if best_of(comparison.results, task) is None else comparison.choice()
    return [
        ResultRow(result, result is choice, [column[index] for column in columns])
        for index, result in enumerate(ordered)
    ]


def _column(comparison: Comparison, task: Measure, results: list[Result]) -> list[Cell | None]:
    best, random = best_of(comparison.results, task), comparison.on_random_weights
    ends = [
        end
        for result in results
        if has_number(result, task) and task.show_interval(result.scores[task.name])
        for end in (result.scores[task.name].low, result.scores[task.name].high, result.scores[task.name].value)
    ]
    cells: list[Cell | None] = []
    for result in results:
        score = result.scores.get(task.name)
        if score is None:
            cells.append(None)
            continue
        interval = task.show_interval(score)
        own = not result.control and has_number(result, task)
        is_best = own and best is not None and score.value == best.scores[task.name].value
        span = None
        if interval:
            low, *_, high = sorted(ends)
            place = [100 * (end - low) / ((high - low) or 1) for end in (score.low, score.value, score.high)]
            span = (place[0], place[1], place[2])
        untrained = random[result.name].scores.get(task.name) if result.name in random else None
        beside = "" if untrained is None else task.show(untrained.value)
        cells.append(Cell(task.show(score.value), interval, is_best, own and score.tied and not is_best, span, beside))
    return cells


def _cost_drawing(comparison: Comparison, directory: Path) -> Iterator[Drawing]:
    task = comparison.tasks[0]
    if not any(
        result.cost is not None and has_number(result, task) for result in comparison.results if not result.control
    ):
        return
    choice = comparison.choice()
    at = "" if choice.cost is None else f" at {measured(choice.cost)} times the cost of the classical embedding"
    alt = (
        f"Scatter plot of cost against {task.name} for every recipe, with the controls as lines. "
        f"{choice.name} reaches {task.show(choice.scores[task.name].value)}{at}. The table holds all the numbers."
    )
    yield _draw(cost_figure(comparison), "cost", alt, directory)


def _scores_drawings(comparison: Comparison, directory: Path) -> Iterator[Drawing]:
    rows = [row.result for row in _rows(comparison)]
    ordered = [result for result in rows if not result.control] + [result for result in rows if result.control]
    for index, task in enumerate(comparison.tasks, start=1):
        if not any(has_number(result, task) for result in ordered):
            continue
        best = best_of(comparison.results, task)
        leads = (
            "" if best is None else f" The best recipe is {best.name} with {task.show(best.scores[task.name].value)}."
        )
        alt = f"Bars of {task.name} with 95% intervals, one a recipe.{leads} The table holds all the numbers."
        slug = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-")
        name = "-".join(filter(None, ["scores", f"{index:02}", slug]))
        yield _draw(scores_figure(comparison, task, ordered), name, alt, directory)


def _draw(figure: Figure, name: str, alt: str, directory: Path) -> Drawing:
    """The picture first: what the PNG's fonts lack, the browser's may have."""
    from matplotlib.text import Text

    freeze(figure)
    buffer = io.StringIO()
    nothing: dict[str, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    for text in figure.findobj(Text):
        if isinstance(text, Text) and (shown := drawable(text.get_text())) != text.get_text():
            text.set_text(shown)
    figure.savefig(directory / f"{name}.png")
    return Drawing(name, alt, f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue().encode()).decode()}")
