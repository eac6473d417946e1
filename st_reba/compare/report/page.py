"""A comparison as a page to look at: HTML that needs nothing else, its figures as PNG, its numbers as CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...evaluation.drawing import drawable, drawing_style, freeze
from ...files import whole_directory
from ...optional import require_report
from ..ranking import best_of, has_number, rank
from ..results import Comparison, Result, Task
from .charts import cost_figure, lengths_figure, scores_figure
from .svg import inline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ASSETS = Path(__file__).parent
# Beyond so many tasks, their figures are folded away on the page.
_OPEN_FIGURES = 6


@dataclass(frozen=True)
class Cell:
    """One score as the table shows it.

    Attributes:
        value: Scaled.
        interval: In brackets; empty if there is none.
        best: Whether no recipe of its column is better; never for a control.
        tied: Whether it cannot be told from the best; never for a control.
        span: Low end, value and high end as percentages of the column's range; None without an interval.
    """

    value: str
    interval: str
    best: bool
    tied: bool
    span: tuple[float, float, float] | None


@dataclass(frozen=True)
class Row:
    """One result as the table shows it; ``cells`` has None where a task does not apply."""

    result: Result
    best: bool
    cells: list[Cell | None]


@dataclass(frozen=True)
class Drawing:
    """One figure: its files' stem, what it shows in words, and its SVG, for narrow screens too if that differs."""

    name: str
    alt: str
    svg: str
    narrow_svg: str = ""


def write_report(comparison: Comparison, directory: Path, called: str = "directory") -> Path:
    """Write ``report.html``, its figures as PNG files, the numbers as ``results.csv`` and all as ``comparison.json``.

    The page is complete in itself: it loads nothing and runs no script.

    Args:
        comparison: What to show.
        directory: Where; it must not exist yet, or be empty. It appears when everything is written.
        called: What the user knows the directory as, such as ``"--report"``.

    Returns:
        The page's path.

    Raises:
        ImportError: If Jinja2 or matplotlib is missing.
        ValueError: If something lies in the directory already, or no recipe has a number on the first task.
        OSError: If it cannot be written.
    """
    require_report()
    comparison.best()
    with whole_directory(directory, called) as scratch:
        write_csv(comparison, scratch / "results.csv")
        comparison.save(scratch / "comparison.json")
        with drawing_style():
            drawings = {
                "cost": list(_cost_drawing(comparison, scratch)),
                "lengths": list(_lengths_drawing(comparison, scratch)),
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
    with whole_directory(directory, called) as scratch:
        write_csv(comparison, scratch / "results.csv")
        comparison.save(scratch / "comparison.json")
    return directory / "results.csv"


def write_csv(comparison: Comparison, path: Path) -> None:
    """Write one line a result, as measured and unrounded: what is not known is empty.

    The columns are recipe, pooling, control; value, low, high, tied of each task; texts_per_second, cost, same_as.
    """
    header = ["recipe", "pooling", "control"]
    for task in comparison.tasks:
        header += [task.name, f"{task.name} low", f"{task.name} high", f"{task.name} tied"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*header, "texts_per_second", "cost", "same_as"])
        for result in comparison.results:
            line: list[object] = [result.recipe, result.pooling, result.control]
            for task in comparison.tasks:
                score = result.scores.get(task.name)
                line += [""] * 4 if score is None else [score.value, score.low, score.high, score.tied]
            writer.writerow([*line, result.sentences_per_second, result.cost, "; ".join(result.same_as)])


def _render(comparison: Comparison, drawings: dict[str, list[Drawing]]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    rows = _rows(comparison)
    task = comparison.tasks[0]
    best, choice = comparison.best(), comparison.choice()
    control = best_of(comparison.results, task, control=True)
    others = [row.result for row in rows if not row.result.control and row.result is not best]
    tied = [result for result in others if has_number(result, task) and result.scores[task.name].tied]
    described = {result.recipe: result for result in comparison.results}
    return environment.get_template("report.html.jinja").render(
        comparison=comparison,
        best=choice,
        control=control,
        unbeaten=control is not None and rank(control, task) <= rank(choice, task),
        others=others,
        tied=tied,
        cheapest=_cheapest(best, tied),
        rows=[row for row in rows if not row.result.control],
        controls=[row for row in rows if row.result.control],
        intervals=any(cell and cell.interval for row in rows for cell in row.cells),
        timed=any(result.cost is not None for result in comparison.results),
        proxies=[task for task in comparison.tasks if task.proxy],
        descriptions=[(result.recipe, result.says) for result in described.values() if result.says],
        drawings=drawings,
        open_figures=_OPEN_FIGURES,
        files=[
            "results.csv",
            "comparison.json",
            *(f"{drawing.name}.png" for group in drawings.values() for drawing in group),
        ],
    )


def _rows(comparison: Comparison) -> list[Row]:
    """All results, the best on the first task first."""
    task = comparison.tasks[0]
    ordered = sorted(comparison.results, key=lambda result: rank(result, task))
    columns = [_column(comparison, task, ordered) for task in comparison.tasks]
    choice = comparison.choice()
    return [
        Row(result, result is choice, [column[index] for column in columns]) for index, result in enumerate(ordered)
    ]


def _column(comparison: Comparison, task: Task, results: list[Result]) -> list[Cell | None]:
    best = best_of(comparison.results, task)
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
        cells.append(Cell(task.show(score.value), interval, is_best, own and score.tied and not is_best, span))
    return cells


def _cheapest(best: Result, tied: list[Result]) -> Result | None:
    """The cheapest recipe that cannot be told from the best, if it is cheaper than that."""
    timed = [(result.cost, index) for index, result in enumerate(tied) if result.cost is not None]
    if best.cost is None or not timed or min(timed)[0] >= best.cost:
        return None
    return tied[min(timed)[1]]


def _cost_drawing(comparison: Comparison, directory: Path) -> Iterator[Drawing]:
    task = comparison.tasks[0]
    if not any(result.cost is not None and has_number(result, task) for result in comparison.results):
        return
    best = comparison.best()
    at = "" if best.cost is None else f" at {best.cost:.2f} times the cost of the classical embedding"
    alt = (
        f"Scatter plot of cost against {task.name} for every recipe and control. The best recipe, {best.name}, reaches "
        f"{task.show(best.scores[task.name].value)}{at}. The table holds all the numbers."
    )
    narrow = inline(cost_figure(comparison, 380), "cost-narrow", alt)
    yield _draw(cost_figure(comparison), "cost", alt, directory, narrow)


def _scores_drawings(comparison: Comparison, directory: Path) -> Iterator[Drawing]:
    rows = [row.result for row in _rows(comparison)]
    ordered = [result for result in rows if not result.control] + [result for result in rows if result.control]
    for index, task in enumerate(comparison.tasks, start=1):
        best = best_of(comparison.results, task)
        leads = (
            "" if best is None else f" The best recipe is {best.name} with {task.show(best.scores[task.name].value)}."
        )
        alt = f"Bars of {task.name} with 95% intervals, one a recipe.{leads} The table holds all the numbers."
        slug = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-")
        name = "-".join(filter(None, ["scores", f"{index:02}", slug]))
        yield _draw(scores_figure(comparison, task, ordered), name, alt, directory)


def _lengths_drawing(comparison: Comparison, directory: Path) -> Iterator[Drawing]:
    lengths = comparison.lengths
    if lengths:
        alt = f"Histogram of the lengths of {len(lengths)} texts, from {min(lengths)} to {max(lengths)} tokens."
        yield _draw(lengths_figure(lengths), "lengths", alt, directory)


def _draw(figure: Figure, name: str, alt: str, directory: Path, narrow_svg: str = "") -> Drawing:
    """The SVG first: what the PNG's fonts lack, the browser's may have."""
    from matplotlib.text import Text

    freeze(figure)
    svg = inline(figure, name, alt)
    for text in figure.findobj(Text):
        if isinstance(text, Text) and (shown := drawable(text.get_text())) != text.get_text():
            text.set_text(shown)
    figure.savefig(directory / f"{name}.png")
    return Drawing(name, alt, svg, narrow_svg)
