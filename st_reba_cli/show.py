"""What ``compare`` shows: running recipes with a progress bar, and showing what was found."""

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
from st_reba.compare.against import side_by_side
from st_reba.compare.report import save_best, write_report, write_results
from st_reba.compare.results import TIED, Cell, Comparison, listed, measured, rows
from st_reba.evaluation.tasks import Measure
from st_reba.optional import require

from .printing import Shown, best_in_bold, console, loading_line, notes, write_json

# Columns that a terminal has room for; the report has them all.
_SHOWN_TASKS = 2
_NAME_WIDTH = 24
_READ_WIDTH = 14
#: Before the name of the recipe that the answer says to use.
_ADVISED = "→ "


def has_page(out: Path | None) -> bool:
    """Whether a report is to have a page; tells early if the packages for it are missing."""
    if out is None:
        return False
    try:
        require("matplotlib.figure", "report", "Drawing")
        require("jinja2", "report", "A report")
    except ImportError as error:
        notes.say(f"--out will be results.csv and comparison.json, without a page. {error} Then --saved draws it.")
        return False
    return True


def kept(out: Path | None) -> TensorCache | None:
    """What a stopped run with the same ``--out`` has left, and what this one will leave if it is stopped."""
    if out is None:
        return None
    directory = partial_of(out)
    if directory.is_dir() and any(directory.glob("*.safetensors")):
        notes.say(f"Going on from {directory}, which a stopped run has left.")
    return TensorCache(directory)


@contextmanager
def running(recipes: Recipes, total: float | None) -> Iterator[None]:
    """A progress bar of ``total`` tokens while recipes run."""
    with Shown("Comparing", "tokens", total) as shown:
        recipes.on_progress = lambda step, tokens: shown.more(tokens, step)
        try:
            yield
        except KeyboardInterrupt:
            if recipes.kept is not None:
                notes.say(f"Stopped: the same command goes on from {recipes.kept.directory}.")
            raise


def partial_of(out: Path) -> Path:
    """Where what was embedded lies until all is written."""
    return out.with_name(f"{out.name}.partial")


def report(found: Comparison, out: Path | None, with_page: bool) -> None:
    """Write the report, if there is to be one."""
    if out is not None:
        written = write_report(found, out, "--out") if with_page else write_results(found, out, "--out")
        console.say(f"Report: {written}")
        shutil.rmtree(partial_of(out), ignore_errors=True)


def write(found: Comparison, recipes: Recipes, out: Path | None, with_page: bool, best: Path | None) -> None:
    """Write the report and the best recipe, this one even if the other cannot be written."""
    try:
        report(found, out, with_page)
    finally:
        if best is not None:
            save_best(found, recipes, best)
            line = loading_line("SentenceTransformer", best)
            console.say(f"Wrote {found.choice().name} to {best}. Load it with: {line}")


def show(found: Comparison, hints: Sequence[str] = (), to: Console = console) -> None:
    """Print a comparison, the answer first, and then what to type.

    Args:
        found: What to show.
        hints: What else could be typed.
        to: Where.
    """
    # In a pipe the first line is all of it.
    to.print(Text(found.answer, style="bold"), soft_wrap=not to.is_terminal)
    if found.build:
        # On one line, however long: it is there to be copied.
        to.print(Text(f"\n{found.build}\n", style="cyan"), soft_wrap=True)
    # Not the table's own title, which would be broken where the table ends.
    run_in = ", ".join(filter(None, (found.settings.get("precision"), found.settings.get("device"))))
    to.print(Text(f"{found.model} on {found.data}{f' ({run_in})' if run_in else ''}", style="italic"))
    to.print(_table(found))
    for sentence in [*found.verdict, *_legend(found), *_left_out(found), *hints]:
        to.print(sentence)


def show_changes(new: Comparison, old: Comparison, to: Console = console) -> None:
    """Print what has changed since an older comparison, that first.

    Raises:
        ValueError: If the two have nothing in common.
    """
    found = side_by_side(new, old)
    first, *more = found.says
    to.print()
    to.print(Text(first, style="bold"), soft_wrap=not to.is_terminal)
    to.print(Text(f"{new.model} on {new.data}, beside {old.model} on {old.data}, {old.date}", style="italic"))
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("Recipe", max_width=_NAME_WIDTH + 6)
    for name in ("Before", "Now", "Difference"):
        table.add_column(name, justify="right", no_wrap=True)
    for change in found.changes:
        ahead = change.difference
        shown = f"{found.task.show(ahead.value)} {found.task.show_interval(ahead)}".rstrip()
        told = Text(f"{TIED}{shown}") if ahead.tied else Text(shown, style="bold")
        table.add_row(change.name, found.task.show(change.old.value), found.task.show(change.new.value), told)
    to.print(table)
    for sentence in [*more, f"In brackets: 95% intervals; {TIED}: cannot be told from no difference."]:
        to.print(sentence)


def show_saved(found: Comparison, old: Comparison | None, out: Path | None, as_json: bool) -> None:
    """Show a saved comparison, and write its report if there is to be one."""
    with_page = has_page(out)
    show(found)
    report(found, out, with_page)
    if old is not None:
        show_changes(found, old)
    if as_json:
        write_json("compare", **found.as_json())


def _table(found: Comparison) -> Table:
    """One row a recipe, the best first and controls last; what it scores on random weights beside it."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    # Long names take a second line, so that the numbers have room.
    table.add_column("Recipe", max_width=_NAME_WIDTH)
    table.add_column("Pool", no_wrap=True)
    tasks, random = found.tasks[:_SHOWN_TASKS], found.on_random_weights
    for number, task in enumerate(tasks):
        table.add_column(task.name.replace(" ", "\n"), justify="right", no_wrap=True)
        if random and number == 0:
            table.add_column("Random", justify="right", style="dim", no_wrap=True)
    chosen = any(result.read_at for result in found.results)
    if chosen:
        table.add_column("Read", max_width=_READ_WIDTH)
    timed = any(result.cost is not None for result in found.results)
    for name in ("Text/s", "Cost") if timed else ():
        table.add_column(name, justify="right", no_wrap=True)
    shown = rows(found)
    for row, following in zip(shown, [*shown, None][1:], strict=True):
        result = row.result
        label = f"{_ADVISED}{result.label}" if result.name == found.use else result.label
        cells: list[str | Text] = [label, result.pooling]
        for number, (task, cell) in enumerate(zip(tasks, row.cells, strict=False)):
            cells.append(_cell(task, cell, with_interval=number == 0))
            if random and number == 0:
                cells.append("" if cell is None or cell.random is None else task.show(cell.random.value))
        if chosen:
            cells.append(result.read_at)
        if timed:
            cells.append("" if result.sentences_per_second is None else measured(result.sentences_per_second))
            cells.append("" if result.cost is None else f"{measured(result.cost)}x")
        ends = following is not None and result.control != following.result.control
        table.add_row(*cells, style="dim" if result.control else None, end_section=ends)
    return table


def _cell(task: Measure, cell: Cell | None, with_interval: bool) -> Text:
    """A value, marked if it is the best (bold) or cannot be told from it."""
    if cell is None:
        return Text()
    text = task.show(cell.score.value)
    if with_interval:
        text = f"{text} {task.show_interval(cell.score, decimals=0 if task.scale > 1 else 2):>9}"
    # In front, so that the numbers stand below each other.
    return Text.assemble(TIED if cell.tied else "", best_in_bold(text, cell.best))


def _legend(found: Comparison) -> list[str]:
    """What the columns are, and where the others are."""
    told = [f"{task.name}, {task.metric}. {task.note}".rstrip() for task in found.tasks[:_SHOWN_TASKS]]
    if hidden := found.tasks[_SHOWN_TASKS:]:
        told.append(f"With --out, also: {listed((task.name for task in hidden), 'tasks more')}.")
    last = f"The best stands first. {_ADVISED.strip()}: what to use. " if found.use else "The best stands first. "
    last += f"In brackets: 95% intervals; {TIED}: cannot be told from the best."
    if found.on_random_weights:
        last += f" Random: {found.tasks[0].name} on random weights, for the best alone."
    if any(result.read_at for result in found.results):
        last += " Read: what was chosen on the first half / on the second. @27: after layer 27."
    if any(result.cost is not None for result in found.results):
        last += " Cost: time beside Classical under the same pooling, on a CPU the processor's, as for Text/s."
    return [*told, last]


def _left_out(found: Comparison) -> list[str]:
    """What could not be run, by the reason."""
    reasons: dict[str, list[str]] = {}
    for recipe, reason in found.skipped:
        reasons.setdefault(reason, []).append(recipe)
    return [f"Left out {listed(names, 'recipes')}: {reason}" for reason, names in reasons.items()]
