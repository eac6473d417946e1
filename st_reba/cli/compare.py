"""``st-reba compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..compare import Result, compare, default_recipes, number_of_steps
from ..data import DEMO_MODEL, DEMO_PAIRS, DEMO_QUESTIONS, read_pairs
from ..evaluation import OddOneOutEvaluator
from ..modules import CausalTransformer
from .common import (
    DeviceOption,
    Dtype,
    DtypeOption,
    LengthOption,
    ModelOption,
    app,
    clear_errors,
    console,
    load,
    marked,
    placement,
)


@app.command("compare")
def compare_command(
    model: ModelOption = str(DEMO_MODEL),
    data: Annotated[
        Path | None, typer.Option(help="Lines of two texts and a score, separated by tabs. Default: demo texts.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 32,
    max_seq_length: LengthOption = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
) -> None:
    """Which recipe suits a model and texts: all of them beside two controls.

    Without --model and --data it runs offline, on the small language model and the labelled texts in the package.
    """
    with clear_errors():
        pairs = read_pairs(DEMO_PAIRS if data is None else data)
        questions = OddOneOutEvaluator.from_csv(DEMO_QUESTIONS).questions if data is None else []
        device, dtype = placement(device, dtype)
        backbone = load(CausalTransformer, model, max_seq_length, dtype).to(device)
        recipes = default_recipes()
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("Comparing", total=number_of_steps(recipes, questions))
            skipped: list[str] = []
            results = compare(
                backbone,
                pairs,
                questions,
                recipes=recipes,
                batch_size=batch_size,
                on_step=lambda step: progress.update(task, advance=1, description=step),
                on_skip=lambda recipe, reason: skipped.append(f"{recipe.name} ({recipe.pooling}): {reason}"),
            )
    shown = "the demo LM" if model == str(DEMO_MODEL) else model
    texts = "demo texts" if data is None else str(data)
    console.print(_table(results, f"{shown} on {len(pairs)} pairs of {texts}"))
    console.print(_reading(results))
    for line in skipped:
        console.print(f"Left out {line}", highlight=False)


def _table(results: list[Result], title: str) -> Table:
    with_words = any(result.odd_one_out is not None for result in results)
    table = Table(title=title, title_justify="left")
    table.add_column("Recipe", no_wrap=True)
    table.add_column("Pooling")
    table.add_column("Spearman", justify="right")
    if with_words:
        table.add_column("Odd one\nout", justify="right")
    table.add_column("Texts/s", justify="right")
    table.add_column("Cost", justify="right")
    own = [result for result in results if not result.recipe.control]
    best = max(result.spearman for result in own)
    best_words = max((result.odd_one_out or 0 for result in own), default=0)
    for index, result in enumerate(results):
        recipe = result.recipe
        cells = [recipe.name, recipe.pooling, marked(f"{100 * result.spearman:.1f}", result.spearman == best)]
        if with_words:
            accuracy = result.odd_one_out
            shown = "" if accuracy is None else f"{100 * accuracy:.1f}"
            cells.append(marked(shown, not recipe.control and accuracy == best_words))
        cells += [f"{result.sentences_per_second:.0f}", f"{result.cost:.2f}x"]
        following = results[index + 1].recipe if index + 1 < len(results) else recipe
        ends = (recipe.control, recipe.pooling) != (following.control, following.pooling)
        table.add_row(*cells, style="dim" if recipe.control else None, end_section=ends and not following.control)
    return table


def _reading(results: list[Result]) -> str:
    """What the table says, and what it does not."""
    best = max((result for result in results if not result.recipe.control), key=lambda result: result.spearman)
    control = max((result for result in results if result.recipe.control), key=lambda result: result.spearman)
    verdict = (
        f"Best: {best.recipe.name} with {best.recipe.pooling} pooling. "
        if best.spearman > control.spearman
        else f"No recipe beats the control '{control.recipe.name}' ({control.recipe.pooling}) on these texts. "
    )
    words = "Odd one out: word sense, four choices (chance 25), the same under every pooling. "
    return (
        f"{verdict}Spearman: cosine similarity against the labels, x 100. "
        f"{words if best.odd_one_out is not None else ''}"
        "Cost: time beside Classical under the same pooling. Dim rows are controls."
    )
