"""What ``compare`` and ``search`` share: running recipes with a progress bar, and showing what was found."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from ..catalogue import Recipe
from ..compare.ranking import best_of
from ..compare.report import write_report, write_results
from ..compare.results import Comparison, Result, Task
from ..compare.run import Recipes
from ..compare.save import save_best
from ..data.demo import DEMO_MODEL
from ..evaluation.bootstrap import Estimate
from ..files import check_free
from ..modules import CausalModule
from ..optional import require_report
from .common import console, marked, progress_bar

# Columns that a terminal has room for; the report has them all.
_SHOWN_TASKS = 2
_NAME_WIDTH = 24


def has_page(report: Path | None, best: Path | None) -> bool:
    """Whether a report is to have a page; says so early if the packages for it are missing.

    Raises:
        ValueError: If something lies where a report or the best recipe is to be written.
    """
    for out, called in ((report, "--report"), (best, "--save-best")):
        if out is not None:
            check_free(out, called)
    if report is None:
        return False
    try:
        require_report()
    except ImportError as error:
        console.print(f"--report will be results.csv and comparison.json, without a page. {error}", soft_wrap=True)
        return False
    return True


def show(found: Comparison, model: str, data: str, hints: Sequence[str] = ()) -> Comparison:
    """Print a comparison, the answer first.

    Args:
        found: What is known but for what the user typed.
        model: As given.
        data: In words.
        hints: What else could be typed.

    Returns:
        The comparison with what the user typed.
    """
    command = shlex.join(["st-reba", *sys.argv[1:]])
    found = replace(found, model=shown_model(model), data=data, command=command)
    console.print(Text(found.answer, style="bold"), soft_wrap=True)
    # Not the table's own title, which would be broken where the table ends.
    run_in = f"{found.settings['precision']}, {found.settings['device']}"
    console.print(Text(f"{found.model} on {found.data} ({run_in})", style="italic"), soft_wrap=True)
    console.print(_table(found))
    for sentence in [*found.verdict, *_legend(found), *hints]:
        console.print(sentence)
    for recipe, reason in found.skipped:
        console.print(f"Left out {recipe}: {reason}")
    return found


def write(found: Comparison, recipes: Recipes, report: Path | None, with_page: bool, best: Path | None) -> None:
    """The report and the best recipe; what keeps one from being written does not keep the other."""
    failed: list[str] = []
    try:
        if report is not None:
            written = write_report(found, report, "--report") if with_page else write_results(found, report, "--report")
            console.print(f"Report: {written}", soft_wrap=True)
    except OSError as error:
        failed.append(str(error))
    try:
        if best is not None:
            save_best(found, recipes, best)
            console.print(
                f'Wrote {found.choice().name} to {best}. Load it with: import st_reba; SentenceTransformer("{best}")',
                soft_wrap=True,
            )
    except OSError as error:
        failed.append(str(error))
    if failed:
        raise OSError(" ".join(failed))


def shown_model(model: str) -> str:
    """What to call a model: as it was given, a file by its name."""
    if model == str(DEMO_MODEL):
        return "the demo LM"
    path = Path(model)
    return path.name if path.is_file() else model


@contextmanager
def running(backbone: CausalModule, asked: Sequence[Recipe], batch_size: int, total: int | None) -> Iterator[Recipes]:
    """The recipes, with a progress bar while they run."""
    with progress_bar() as progress:
        bar = progress.add_task("Comparing", total=total)
        yield Recipes(
            backbone,
            asked,
            batch_size=batch_size,
            on_progress=lambda what, texts: progress.update(bar, advance=texts, description=what),
        )


def _table(found: Comparison) -> Table:
    """One row a recipe, its control on random weights beside it."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    # Long names take a second line, so that the numbers have room.
    table.add_column("Recipe", max_width=_NAME_WIDTH)
    table.add_column("Pool", no_wrap=True)
    tasks = found.tasks[:_SHOWN_TASKS]
    random = _on_random_weights(found)
    beside = {result.name for result in random.values()}
    for task in tasks:
        table.add_column(task.name.replace(" ", "\n"), justify="right", no_wrap=True)
        if random:
            table.add_column("Random", justify="right", style="dim", no_wrap=True)
    table.add_column("Text/s", justify="right", no_wrap=True)
    table.add_column("Cost", justify="right", no_wrap=True)
    shown = [result for result in found.results if result.name not in beside]
    poolings = list(dict.fromkeys(result.pooling for result in shown))
    shown.sort(key=lambda result: (not result.control, poolings.index(result.pooling)))
    for index, result in enumerate(shown):
        control = random.get(result.name)
        cells: list[str | Text] = [result.label, result.pooling]
        for number, task in enumerate(tasks):
            cells.append(
                _cell(
                    task,
                    result.scores.get(task.name),
                    result is best_of(found.results, task),
                    with_interval=number == 0,
                )
            )
            if random:
                score = None if control is None else control.scores.get(task.name)
                cells.append("" if score is None else task.show(score.value))
        cells.append("" if result.sentences_per_second is None else f"{result.sentences_per_second:.0f}")
        cells.append("" if result.cost is None else f"{result.cost:.2f}x")
        following = shown[index + 1] if index + 1 < len(shown) else result
        ends = (result.control, result.pooling) != (following.control, following.pooling)
        table.add_row(*cells, style="dim" if result.control else None, end_section=ends)
    return table


def _cell(task: Task, score: Estimate | None, best: bool, with_interval: bool) -> Text:
    """A value, marked if it is the best (bold) or cannot be told from it (=)."""
    if score is None:
        return Text()
    text = task.show(score.value)
    if with_interval:
        text = f"{text} {task.show_interval(score, decimals=0 if task.scale > 1 else 2):>9}"
    # Not a space, which would be trimmed.
    mark = "=" if score.tied and not best else "\N{NO-BREAK SPACE}"
    return Text.assemble(marked(text, best), mark)


def _legend(found: Comparison) -> list[str]:
    """What the columns are, and where the others are."""
    notes = [f"{task.name}, {task.metric}. {task.note}".rstrip() for task in found.tasks[:_SHOWN_TASKS]]
    if hidden := found.tasks[_SHOWN_TASKS:]:
        notes.append(f"With --report, also: {'; '.join(task.name for task in hidden)}.")
    random = "Random: the same on random weights, for the best alone. " if _on_random_weights(found) else ""
    return [
        *notes,
        f"In brackets: 95% intervals. Bold: the best; =: cannot be told from it. {random}Cost: time beside Classical "
        "under the same pooling.",
    ]


def _on_random_weights(found: Comparison) -> dict[str, Result]:
    """What was run on random weights, by the name of the result that it is the control of."""
    named = {result.name: result for result in found.results}
    return {
        result.name: named[control.name]
        for result in found.results
        for control in result.controls
        if control.kind == "random" and control.name in named
    }
