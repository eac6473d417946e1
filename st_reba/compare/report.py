"""A comparison written to files: a page with pictures, numbers as CSV, all of it as JSON, and the recipe as a model."""

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
from ..recipes.recipe import device_of
from .pictures import cost_figure, drawing_style, freeze, levels, round_axis, timed
from .recipes import Recipes
from .results import TIED, Comparison, best_of, measured, rows

_ASSETS = Path(__file__).parent.parent / "assets"
# Number of recipes that the page shows; the others are folded away.
_OPEN_ROWS = 15


def write_report(comparison: Comparison, directory: Path, called: str = "directory", page: bool = True) -> Path:
    """Write ``results.csv`` and ``comparison.json``, and ``report.html`` with its figure ``cost.png``.

    The page is complete in itself: it loads nothing and runs no script.

    Args:
        comparison: What to show.
        directory: Where; it must not exist yet, or be empty. It appears when everything is written.
        called: The user's name for the directory, such as ``"--out"``.
        page: Whether to write the page, which needs Jinja2 and matplotlib.

    Returns:
        The path of the page, or else of the CSV file.

    Raises:
        ImportError: If Jinja2 or matplotlib is missing.
        ValueError: If something lies in the directory already.
        OSError: If it cannot be written.
    """
    if page:
        require("matplotlib.figure", "report", "Drawing")
        require("jinja2", "report", "A report")
    with atomic_directory(directory, called) as scratch:
        write_csv(comparison, scratch / "results.csv")
        comparison.save(scratch / "comparison.json")
        if page:
            (scratch / "report.html").write_text(_page(comparison, _draw(comparison, scratch)), encoding="utf-8")
    return directory / ("report.html" if page else "results.csv")


def write_csv(comparison: Comparison, path: Path) -> None:
    """Write one line a result, unrounded; an unknown value is empty.

    The columns are recipe, pooling, control, corrected (of the best on the first task); of each task the value, low,
    high, tied, and the value on random weights; texts_per_second, cost, same_as, read_at.
    """
    header = ["recipe", "pooling", "control", "corrected"]
    for task in comparison.tasks:
        header += [task.name, *(f"{task.name} {part}" for part in ("low", "high", "tied", "random"))]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*header, "texts_per_second", "cost", "same_as", "read_at"])
        for row in rows(comparison):
            result, first = row.result, row.cells[0]
            corrected = None if first is None else first.score.corrected
            line: list[object] = [result.recipe, result.pooling, result.control, corrected]
            for cell in row.cells:
                score = None if cell is None else cell.score
                line += [None] * 4 if score is None else [score.value, score.low, score.high, score.tied]
                line.append(None if cell is None or cell.random is None else cell.random.value)
            line += [result.sentences_per_second, result.cost, "; ".join(result.same_as), result.read_at]
            writer.writerow(line)


def save_best(comparison: Comparison, recipes: Recipes, out: Path) -> SentenceTransformer:
    """Write the recipe to use, or else the best, as a SentenceTransformer directory with the scores on its card.

    Args:
        comparison: The comparison.
        recipes: Recipes that were compared.
        out: Directory to write; it must not exist yet, or be empty.

    Returns:
        The model, whose vectors are of length 1.

    Raises:
        ValueError: If no recipe has a score, or ``out`` holds something.
    """
    best = comparison.choice()
    built = (best.name, best.spec, best.template, best.shares)
    recipe = next(
        own
        for own in recipes.all
        if built == (own.candidate_of or own.result, own.key, own.wording.template if own.wording else "", own.shares)
    )
    # The build command fits on the same texts.
    fitted = replace(recipe, fit_texts=recipe.fit_texts or recipes.fit_on[-1]) if recipe.fitted else recipe
    parts = list(fitted.model(recipes.backbone).children())
    device = device_of(recipes.backbone)
    model = SentenceTransformer(modules=[*parts, Normalize()], device=device, prompts=comparison.prompts or None)
    card.add_recipe(model, recipe.name, recipe.key, recipe.says, recipe.row.citation)
    controls = {control.name for control in best.controls}
    table = []
    for row in rows(comparison, [best, *(other for other in comparison.results if other.name in controls)]):
        cells = zip(comparison.tasks, row.cells, strict=True)
        scores = [task.show_with_interval(cell.score, TIED * cell.tied) if cell else "" for task, cell in cells]
        table.append([row.result.name, *scores])
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
    """Return the page; ``figure`` has the address and the description of the picture."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    table = rows(comparison)
    own = [row for row in table if not row.result.control]
    scored = best_of(comparison.results, comparison.tasks[0]) is not None
    place, ticks = round_axis(comparison)
    return environment.get_template("report.html.jinja").render(
        comparison=comparison,
        measured=measured,
        tied=TIED,
        choice=comparison.choice() if scored else None,
        rows=own[:_OPEN_ROWS],
        folded=own[_OPEN_ROWS:],
        controls=[row for row in table if row.result.control],
        place=place,
        ticks=ticks,
        levels=rows(comparison, levels(comparison)),
        figure=figure,
    )


def _draw(comparison: Comparison, directory: Path) -> dict[str, str] | None:
    """Draw score against cost, as a PNG file and as SVG for the page; None if no recipe has both."""
    task = comparison.tasks[0]
    if not timed(comparison):
        return None
    with drawing_style():
        figure = cost_figure(comparison)
        freeze(figure)
        buffer = io.StringIO()
        nothing: dict[str, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        figure.savefig(directory / "cost.png")
    choice = comparison.choice()
    cost = "" if choice.cost is None else f" at {measured(choice.cost)} times the cost of the classical embedding"
    return {
        "address": f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue().encode()).decode()}",
        "alt": f"Scatter plot of cost against {task.name} for every recipe, with the controls as lines. {choice.name} "
        f"reaches {task.show(choice.scores[task.name].best_guess)}{cost}. The table holds all numbers.",
    }
