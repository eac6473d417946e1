"""What a comparison found, written down: a page with pictures, its numbers as CSV, and the recipe to use as a model.

The page is HTML that needs nothing else.
"""

from __future__ import annotations

import base64
import csv
import io
from dataclasses import replace
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from ..files import atomic_directory
from ..hub import card
from ..optional import require
from ..recipes.recipe import Recipe, device_of
from .pictures import cost_figure, drawable, drawing_style, freeze, levels, round_axis, timed
from .recipes import Recipes
from .results import TIED, Comparison, Result, best_of, measured, rows

_ASSETS = Path(__file__).parent.parent / "assets"
# So many recipes are shown on the page; the others are folded away.
_OPEN_ROWS = 15
# On a page with more tasks, random weights stand beside the first alone.
_FEW_TASKS = 3


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

    That is what the answer names, or the best where it names none. The card says which.

    Args:
        comparison: Says which recipe it is.
        recipes: What was compared.
        out: Directory to write; it must not exist yet, or be empty.

    Returns:
        The model, whose vectors are of length 1.

    Raises:
        ValueError: If no recipe has a number, or ``out`` holds something.
    """
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
    place, ticks = round_axis(comparison)
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
        intervals=any(
            task.show_interval(cell.score) for row in table for task, cell in zip(tasks, row.cells, strict=True) if cell
        ),
        place=place,
        ticks=ticks,
        levels=rows(comparison, levels(comparison)),
        timed=any(result.cost is not None for result in comparison.results),
        descriptions={row.result.recipe: row.result.says for row in table if row.result.says},
        figure=figure,
    )


def _draw(comparison: Comparison, directory: Path) -> dict[str, str] | None:
    """Score against cost, if anything was timed: as a PNG beside the page, and in it as SVG."""
    from matplotlib.text import Text

    task = comparison.tasks[0]
    if not timed(comparison):
        return None
    with drawing_style():
        figure = cost_figure(comparison)
        freeze(figure)
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
