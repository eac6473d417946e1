"""Output of ``compare``: a bar of progress, the comparison as a table, its report and its JSON."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from st_reba.compare import Recipes, TensorCache
from st_reba.compare.report import save_best, write_report
from st_reba.compare.results import TIED, Cell, Comparison, listed, measured, rows, side_by_side
from st_reba.evaluation.tasks import Measure
from st_reba.files import held

from .printing import Shown, console, loading_line, notes, write_json

# Columns that a terminal has room for; the report has them all.
_SHOWN_TASKS = 2
_NAME_WIDTH = 24
_READ_WIDTH = 14
#: Mark of the recipe to use.
_ADVISED = "→ "


@contextmanager
def kept(out: Path | None) -> Iterator[TensorCache | None]:
    """Lock and yield the cache of embeddings; the same command resumes from the cache of a stopped run."""
    if out is None:
        yield None
        return
    directory = _partial(out)
    with held(directory, "--out"):
        if directory.is_dir() and any(directory.glob("*.safetensors")):
            notes.say(f"Going on from {directory}, which a stopped run has left.")
        yield TensorCache(directory)


@contextmanager
def running(recipes: Recipes, total: float | None) -> Iterator[None]:
    """Show a bar of progress of ``total`` tokens while recipes run."""
    with Shown("Comparing", "tokens", total and round(total)) as shown:
        recipes.on_progress = lambda step, tokens: shown.more(round(tokens), step)
        try:
            yield
        except KeyboardInterrupt:
            if recipes.kept is None:
                notes.say("Stopped: nothing was kept; --out keeps it.")
            else:
                notes.say(f"Stopped: the same command goes on from {recipes.kept.directory}.")
            raise


def _partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def present(
    comparison: Comparison,
    old: Comparison | None,
    out: Path | None,
    as_json: bool,
    hints: Sequence[str] = (),
    run: Recipes | None = None,
    save_to: Path | None = None,
) -> None:
    """Print a comparison, write its report, and save the best recipe.

    Args:
        comparison: The comparison.
        old: An older one, whose differences are printed; None: none.
        out: Directory of the report; None: none.
        as_json: Whether JSON is printed as well.
        hints: Sentences to end with.
        run: The recipes that were compared.
        save_to: Directory of the best recipe, saved even if the report cannot be written; None: nothing is saved.
    """
    show(comparison, hints)
    try:
        if out is not None:
            console.say(f"Report: {write_report(comparison, out, '--out')}")
            shutil.rmtree(_partial(out), ignore_errors=True)
    finally:
        if run is not None and save_to is not None:
            save_best(comparison, run, save_to)
            line = loading_line("SentenceTransformer", save_to)
            console.say(f"Wrote {comparison.choice().name} to {save_to}. Load it with: {line}")
    if old is not None:
        show_changes(comparison, old)
    if as_json:
        write_json("compare", **comparison.as_json())


def show(comparison: Comparison, hints: Sequence[str] = (), to: Console = console) -> None:
    """Print a comparison, the answer first, and then the command that builds the recipe.

    Args:
        comparison: The comparison.
        hints: Sentences to end with.
        to: Console to print to.
    """
    # In a pipe the first line is the whole answer.
    to.print(Text(comparison.answer, style="bold"), soft_wrap=not to.is_terminal)
    if comparison.build:
        # On one line, however long: it is there to be copied.
        to.print(Text(f"\n{comparison.build}\n", style="cyan"), soft_wrap=True)
    # rich would break a title of the table at the table's width.
    run_in = ", ".join(filter(None, map(comparison.settings.get, ("precision", "device"))))
    to.print(Text(f"{comparison.model} on {comparison.data}{f' ({run_in})' if run_in else ''}", style="italic"))
    to.print(_table(comparison))
    for sentence in [*_left_out(comparison), *comparison.verdict, *_legend(comparison), *hints]:
        to.print(sentence)


def show_changes(new: Comparison, old: Comparison, to: Console = console) -> None:
    """Print the differences from an older comparison.

    Raises:
        ValueError: If the two have nothing in common.
    """
    changes = side_by_side(new, old)
    first, *more = changes.sentences
    to.print()
    to.print(Text(first, style="bold"), soft_wrap=not to.is_terminal)
    to.print(Text(f"{new.model} on {new.data}; before: {old.model} on {old.data}, {old.date}", style="italic"))
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("Recipe", max_width=_NAME_WIDTH + 6)
    for name in ("Before", "Now", "Difference"):
        table.add_column(name, justify="right", no_wrap=True)
    task = changes.task
    for change in changes.changes:
        difference = task.show_with_interval(change.difference)
        text = Text(f"{TIED}{difference}") if change.difference.tied else Text(difference, style="bold")
        table.add_row(change.name, task.show(change.old.value), task.show(change.new.value), text)
    to.print(table)
    for sentence in [*more, f"In brackets: 95% intervals; {TIED}: cannot be told from no difference."]:
        to.print(sentence)


def _table(comparison: Comparison) -> Table:
    """Return one row a recipe, the best first and controls last."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    # Long names take a second line, so that the numbers have room.
    table.add_column("Recipe", max_width=_NAME_WIDTH)
    table.add_column("Pool", no_wrap=True)
    tasks, random = comparison.tasks[:_SHOWN_TASKS], comparison.on_random_weights
    for number, task in enumerate(tasks):
        table.add_column(task.name.replace(" ", "\n"), justify="right", no_wrap=True)
        if random and number == 0:
            table.add_column("Random", justify="right", style="dim", no_wrap=True)
    chosen = any(result.read_at for result in comparison.results)
    if chosen:
        table.add_column("Read", max_width=_READ_WIDTH)
    for name in ("Text/s", "Cost"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = rows(comparison)
    for row, following in zip(shown, [*shown, None][1:], strict=True):
        result = row.result
        label = f"{_ADVISED}{result.recipe}" if result.name == comparison.use else result.recipe
        cells: list[str | Text] = [label, result.pooling]
        for number, (task, cell) in enumerate(zip(tasks, row.cells, strict=False)):
            cells.append(_cell(task, cell, with_interval=number == 0))
            if random and number == 0:
                cells.append("" if cell is None or cell.random is None else task.show(cell.random.value))
        if chosen:
            cells.append(result.read_at)
        cells.append("" if result.sentences_per_second is None else measured(result.sentences_per_second))
        cells.append("" if result.cost is None else f"{measured(result.cost)}x")
        ends = following is not None and result.control != following.result.control
        table.add_row(*cells, style="dim" if result.control else None, end_section=ends)
    return table


def _cell(task: Measure, cell: Cell | None, with_interval: bool) -> Text:
    """Return a value, marked if it is the best (bold) or cannot be told from it; the corrected one on a second line."""
    if cell is None:
        return Text()
    score, interval = cell.score, ""
    if with_interval:
        interval = f" {task.show_interval(score, decimals=0 if task.scale > 1 else 2):>9}"
    value, style = task.show(score.value), "bold green" if cell.best else ""
    if score.corrected is None:
        # The mark is in front, so that the numbers are below each other.
        return Text.assemble(TIED if cell.tied else "", (f"{value}{interval}", style))
    return Text(f"{value}{' ' * len(interval)}\n{task.show(score.corrected)}{interval}", style)


def _legend(comparison: Comparison) -> list[str]:
    """Return what the columns and marks mean."""
    columns = [f"{task.name}, {task.metric}. {task.note}".rstrip() for task in comparison.tasks[:_SHOWN_TASKS]]
    if hidden := comparison.tasks[_SHOWN_TASKS:]:
        columns.append(f"With --out, also: {listed((task.name for task in hidden), 'tasks more')}.")
    marks = f"The best is first. {_ADVISED.strip()}: recipe to use. " if comparison.use else "The best is first. "
    if any(score.corrected is not None for result in comparison.results for score in result.scores.values()):
        marks += "A second score is corrected for being the best of many recipes. "
    marks += f"In brackets: 95% intervals; {TIED}: cannot be told from the best."
    if comparison.on_random_weights:
        marks += f" Random: {comparison.tasks[0].name} on random weights, for the best alone."
    if any(result.read_at for result in comparison.results):
        marks += " Read: settings that all items choose. @27: after layer 27."
    return [*columns, f"{marks} Cost: time as a multiple of Classical's under the same pooling; on a CPU, as Text/s, "
            "of the processor."]  # fmt: skip


def _left_out(comparison: Comparison) -> list[str]:
    """Return the recipes that could not run, by the reason."""
    reasons: dict[str, list[str]] = {}
    for recipe, reason in comparison.skipped:
        reasons.setdefault(reason, []).append(recipe)
    return [f"Left out {listed(names, 'recipes')}: {reason}" for reason, names in reasons.items()]
