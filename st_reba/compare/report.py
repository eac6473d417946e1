"""A comparison written to files: a page with pictures, numbers as CSV, all of it as JSON, and the recipe as a model."""

from __future__ import annotations

import csv
import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sentence_transformers import SentenceTransformer

from ..build import build
from ..evaluation.tasks import Measure
from ..files import atomic_directory
from ..hub import card
from ..recipes.recipe import TF_IDF, device_of
from .recipes import Recipes, in_short
from .results import TIED, Comparison, Result, TableRow, best_of, has_number, measured, rank, rows

_ASSETS = Path(__file__).parent.parent / "assets"
# Number of labels that a picture of usual height has room for.
_LABELS = 20
# Number of recipes that the page shows; the others are folded away.
_OPEN_ROWS = 15
#: From a value to its place on an axis, in percent; and the values and texts of the ticks.
Axis = tuple[Callable[[float], float], list[tuple[float, str]]]
# Rows with their scores by layer, or by cost.
_Points = Sequence[tuple[TableRow, Mapping[Any, float]]]

# Most steps between ticks; a step is one of these times a power of ten.
_STEPS = 6
_ROUND = (1, 2, 5)


def write_report(comparison: Comparison, directory: Path, called: str = "directory") -> Path:
    """Write ``report.html``, the numbers as ``results.csv``, and all of it as ``comparison.json``.

    The page is complete in itself: it loads nothing, and a script in it sorts the tables.

    Args:
        comparison: What to show.
        directory: Where; it must not exist yet, or be empty. It appears when everything is written.
        called: The user's name for the directory, such as ``"--out"``.

    Returns:
        The path of the page.

    Raises:
        ValueError: If something lies in the directory already.
        OSError: If it cannot be written.
    """
    with atomic_directory(directory, called) as scratch:
        write_csv(comparison, scratch / "results.csv")
        comparison.save(scratch / "comparison.json")
        (scratch / "report.html").write_text(_page(comparison), encoding="utf-8")
    return directory / "report.html"


def write_csv(comparison: Comparison, path: Path) -> None:
    """Write one line a result, unrounded; an unknown value is empty.

    The columns are recipe, pooling, control, corrected (of the best on the first task); of each task the value, low,
    high, tied, and the value on random weights; texts_per_second, cost, read_at.
    """
    header = ["recipe", "pooling", "control", "corrected"]
    for task in comparison.tasks:
        header += [task.name, *(f"{task.name} {part}" for part in ("low", "high", "tied", "random"))]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*header, "texts_per_second", "cost", "read_at"])
        for row in rows(comparison):
            result, first = row.result, row.cells[0]
            corrected = None if first is None else first.score.corrected
            line: list[object] = [result.recipe, result.pooling, result.control, corrected]
            for cell in row.cells:
                score = None if cell is None else cell.score
                line += [None] * 4 if score is None else [score.value, score.low, score.high, score.tied]
                line.append(None if cell is None or cell.random is None else cell.random.value)
            writer.writerow([*line, result.sentences_per_second, result.cost, result.read_at])


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
    recipe = next(
        own for own in recipes.all if (own.candidate_of or own.result, in_short(own)) == (best.name, best.read_at)
    )
    # The build command fits on the same texts.
    fitted = replace(recipe, fit_texts=recipe.fit_texts or recipes.fit_on[-1]) if recipe.fitted else recipe
    device = device_of(recipes.backbone)
    model = build(recipes.backbone, fitted, prompts=comparison.prompts or {}, device=device)
    controls = {control.name for control in best.controls}
    table = []
    for row in rows(comparison, [best, *(other for other in comparison.results if other.name in controls)]):
        cells = zip(comparison.tasks, row.cells, strict=True)
        scores = [task.show_with_interval(cell.score, TIED * cell.tied) if cell else "" for task, cell in cells]
        table.append([row.result.name, *scores])
    columns = [f"{task.name} ({task.metric})" for task in comparison.tasks]
    note = (
        f"Chosen from the recipes that `{comparison.command}` compared on {comparison.data} ({comparison.date}). Each "
        "score is by settings that other items chose. The best one is also corrected for being the best of many. Its "
        f"controls follow it; 95% intervals in brackets; {TIED}: cannot be told from the best."
    )
    texts = {"answer": comparison.answer, "note": note, "verdict": comparison.verdict}
    card.adopt(model).comparison = {**texts, "columns": columns, "rows": table}
    with atomic_directory(out, "--save-best") as scratch:
        model.save_pretrained(str(scratch))
    return model


def _page(comparison: Comparison) -> str:
    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    task, table = comparison.tasks[0], rows(comparison)
    ranked = [row for row in table if not row.result.control]
    scored = best_of(comparison.results, task) is not None
    choice = comparison.choice() if scored else None
    timed = [row for row in ranked if row.result.cost and has_number(row.result, task)]
    by_cost = [(row, {row.result.cost or 1.0: row.result.scores[task.name].value}) for row in timed]
    curved = [row for row in ranked[:_OPEN_ROWS] if row.result.by_layer]
    by_layer = [(row, {int(layer): score for layer, score in row.result.by_layer.items()}) for row in curved]
    strongest = rows(comparison, levels(comparison))
    drawn = [row.cells[0].score for row in [*ranked[:_OPEN_ROWS], *strongest] if row.cells[0]]
    script = (_ASSETS / "report.js").read_text(encoding="utf-8")
    return environment.get_template("report.html.jinja").render(
        comparison=comparison,
        measured=measured,
        tied=TIED,
        choice=choice,
        rows=ranked[:_OPEN_ROWS],
        folded=ranked[_OPEN_ROWS:],
        controls=[row for row in table if row.result.control],
        scores=score_axis(task, [end for score in drawn for end in (score.low, score.value, score.high)]),
        levels=strongest,
        timed=_picture(task, by_cost, cost_axis, strongest),
        curves=_picture(task, by_layer, layer_axis),
        labels=_LABELS,
        script=script,
        digest=b64encode(sha256(script.encode()).digest()).decode(),
    )


# Places in the pictures: on the axes of scores, costs and layers


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


def score_axis(task: Measure, scores: Sequence[float]) -> Axis:
    """Return the axis of a task's scores, from tick to tick."""
    ends = [task.scale * score for score in scores if math.isfinite(score)]
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
    low, high = math.log10(min(costs, default=1.0)), math.log10(max(costs, default=1.0))
    margin = max(0.1, 0.2 * (high - low))

    def place(cost: float) -> float:
        return 100 * (math.log10(cost) - low + margin) / (high - low + 2 * margin)

    powers = range(math.floor(low) - 1, math.ceil(high) + 1)
    ticks = [part * 10.0**power for power in powers for part in _ROUND]
    return place, [(tick, f"{tick:g}\N{MULTIPLICATION SIGN}") for tick in ticks if 0 <= place(tick) <= 100]


def layer_axis(layers: Sequence[int]) -> Axis:
    """Return the axis of layers, with room on both sides, and the layers that were tried as its ticks."""
    low, high = min(layers, default=0), max(layers, default=0)

    def place(layer: float) -> float:
        return 5 + 90 * (layer - low) / max(1, high - low)

    return place, [(layer, str(layer)) for layer in sorted({*layers})]


def label_places(values: Sequence[float]) -> list[float]:
    """Return heights of labels in percent, in the order of values in percent, each as near to its own as there is room.

    Args:
        values: At most as many as :data:`_LABELS` without the labels moving closer.
    """
    order, gap = sorted(range(len(values)), key=lambda place: -values[place]), 100 / max(_LABELS, len(values))
    places, above, below = [0.0] * len(values), 100 + gap, -gap
    for place in order:
        above = places[place] = min(values[place], above - gap)
    for place in reversed(order):
        below = places[place] = max(places[place], below + gap)
    return places


def _picture(
    task: Measure, recipes: _Points, axis: Callable[[Sequence[Any]], Axis], controls: Sequence[TableRow] = ()
) -> Mapping[str, object]:
    """Return what a picture shows, in percent: ticks, controls, and each row's points and the height of its label."""
    lines = {row.result.name: row.result.scores[task.name].value for row in controls}
    across, columns = axis([x for _, scores in recipes for x in scores])
    up, heights = score_axis(task, [*lines.values(), *(y for _, scores in recipes for y in scores.values())])
    points = [[(across(x), up(y)) for x, y in sorted(scores.items())] for _, scores in recipes]
    labels = label_places([curve[-1][1] for curve in points])
    return {
        "rows": [(row, curve, label) for (row, _), curve, label in zip(recipes, points, labels, strict=True)],
        "across": [(across(value), tick) for value, tick in columns],
        "up": [(up(value), tick) for value, tick in heights],
        "lines": [(up(value), name) for name, value in lines.items()],
    }
