"""``st-reba compare``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, TimeElapsedColumn
from rich.progress import Task as Bar
from rich.table import Table
from rich.text import Text

from ..catalogue import RANDOM, Recipe, default_recipes, worth_trying
from ..compare.mteb import resolve_tasks
from ..compare.ranking import best_of
from ..compare.report import require_report, write_report, write_results
from ..compare.results import Comparison, Task
from ..compare.run import Recipes, compare, compare_tasks, work
from ..compare.save import save_best
from ..compare.search import Found, with_selection
from ..compare.search import search as run_search
from ..data.demo import DEMO_MODEL, demo_pairs, demo_questions, demo_sentences
from ..data.demo import Language as DemoLanguage
from ..data.tables import Pairs, read_data, read_texts
from ..evaluation import OddOneOutEvaluator
from ..evaluation.bootstrap import Estimate
from ..files import check_free
from ..modules import CausalModule, CausalTransformer
from .common import (
    DeviceOption,
    Dtype,
    DtypeOption,
    LengthOption,
    ModelOption,
    app,
    check_devices,
    check_file,
    clear_errors,
    console,
    description,
    load,
    marked,
    placement,
)
from .several import ManyTasks

# With --recipes all.
_REPETITIONS = 3
# Columns that a terminal has room for; the report has them all.
_SHOWN_TASKS = 2
_NAME_WIDTH = 24


class RecipeSet(str, Enum):
    few = "few"
    all = "all"


class Language(str, Enum):
    en = "en"
    zh = "zh"


#: Each language's name, in English.
_LANGUAGES: dict[DemoLanguage, str] = {"en": "English", "zh": "Chinese"}


@app.command("compare", cls=ManyTasks)
def compare_command(
    model: ModelOption = str(DEMO_MODEL),
    data: Annotated[
        Path | None,
        typer.Option(
            help="Lines of two texts and a score, separated by tabs; or plain texts, one a line, for which there are "
            "proxies only. Default: demo texts."
        ),
    ] = None,
    language: Annotated[
        Language | None, typer.Option(help="Of the demo texts: English (the default) or Chinese.", show_default=False)
    ] = None,
    words: Annotated[
        Path | None, typer.Option(help="Word-sense questions (CSV: 问题,选项1,...,选项4,答案), beside the data.")
    ] = None,
    mteb: Annotated[
        list[str] | None,
        typer.Option(help="Tasks of mteb instead of data, any number of names; C-MTEB for its 31."),
    ] = None,
    mteb_results: Annotated[
        Path | None, typer.Option(help="Where mteb's results are kept, and found again by the next run.")
    ] = None,
    recipes: Annotated[
        RecipeSet | None,
        typer.Option(help="The few that are most worth trying (the default), or all there are.", show_default=False),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Look for the best of all combinations of template, repetition, output layer, pooling and filter, on "
            "one half of the labelled pairs, and show the other half.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the two halves (--search).")] = 0,
    fit_texts: Annotated[
        Path | None,
        typer.Option(
            help="Plain texts, one a line, to fit filters and tf-idf on. Default: demo texts; for tf-idf the data."
        ),
    ] = None,
    repetitions: Annotated[
        int | None,
        typer.Option(
            help="Copies of the text, at most (--recipes all; default: 3).", min=1, max=64, show_default=False
        ),
    ] = None,
    random: Annotated[
        bool,
        typer.Option(
            "--random/--no-random",
            help="Run the best recipes, at most 3, on random weights as well: what of a score needs no training.",
        ),
    ] = True,
    report: Annotated[
        Path | None, typer.Option(help="Directory to write report.html, its figures and results.csv to.")
    ] = None,
    best: Annotated[
        Path | None, typer.Option("--save-best", help="Directory to write the best recipe to, ready to load.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 32,
    max_seq_length: LengthOption = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
) -> None:
    """Which recipe suits a model and texts: recipes beside their controls, with 95% intervals, and an answer first.

    Without --model and --data it runs offline, on the small language model and the labelled texts in the package.
    """
    with clear_errors():
        if mteb and (data or words):
            raise ValueError("--mteb brings its own texts: leave --data and --words out, or run twice.")
        if mteb_results and not mteb:
            raise ValueError("--mteb-results is for --mteb, which names the tasks.")
        for out, called in ((report, "--report"), (best, "--save-best")):
            if out is not None:
                check_free(out, called)
        with_page = report is not None and _has_page()
        check_devices(device)
        for path, called in ((data, "--data"), (words, "--words"), (fit_texts, "--fit-texts")):
            check_file(path, called)
        if search and (recipes or repetitions):
            raise ValueError("--search has combinations of its own: leave --recipes and --repetitions out.")
        every = recipes is RecipeSet.all
        if repetitions and not every:
            raise ValueError("--repetitions is for --recipes all: the few have at most two copies of a text.")
        if language and (data or mteb):
            raise ValueError("--language chooses among the demo texts: leave it out with --data and --mteb.")
        demo: DemoLanguage = "en" if language is None else language.value
        tasks = resolve_tasks(mteb) if mteb else []
        texts = read_data(demo_pairs(demo) if data is None else data)
        if best is not None and not tasks and not isinstance(texts, Pairs):
            raise ValueError(
                "--save-best needs labels, and plain texts have none: use st-reba build to choose yourself."
            )
        if search and (tasks or words or fit_texts or not isinstance(texts, Pairs)):
            raise ValueError(
                "--search chooses by labelled pairs, on the texts of which it also fits: leave --mteb, --words and "
                "--fit-texts out, and give --data with lines of two texts and a score."
            )
        questions = None if tasks or search else _questions(words, demo if data is None else None)
        fit_on = None if fit_texts is None else read_texts(fit_texts)
        device, dtype = placement(device, dtype)
        backbone = load(CausalTransformer, model, max_seq_length, dtype).to(device)
        shown = _shown(model)
        chosen = None
        if search and isinstance(texts, Pairs):
            chosen = _searched(backbone, texts, seed, batch_size)
            texts = chosen.held_out
        if chosen is not None:
            asked = chosen.recipes()
        else:
            plain = demo_sentences(None if data or tasks else demo) if fit_on is None else fit_on
            asked = default_recipes(repetitions or _REPETITIONS, plain) if every else worth_trying(plain)
        total = None if tasks else work(texts, questions, batch_size, random)
        with _recipes(backbone, asked, batch_size, total) as compared:
            if tasks:
                found = compare_tasks(compared, tasks, model=shown, output=mteb_results, random=random)
                measured_on = f"{len(tasks)} tasks of mteb"
            else:
                key = "" if chosen is None else chosen.chosen
                found = compare(compared, texts, questions, fit_texts=fit_on, chosen=key, random=random)
                measured_on = _named(texts, data, demo) + ("" if chosen is None else ", held out")
        if chosen is not None:
            found = with_selection(chosen, found)
        found = replace(found, model=shown, data=measured_on, command=shlex.join(["st-reba", *sys.argv[1:]]))
        console.print(Text(found.answer, style="bold"), soft_wrap=True)
        # Not the table's own title, which would be broken where the table ends.
        run_in = f"{found.settings['precision']}, {found.settings['device']}"
        console.print(Text(f"{found.model} on {found.data} ({run_in})", style="italic"), soft_wrap=True)
        console.print(_table(found))
        for sentence in [*found.verdict, *_legend(found)]:
            console.print(sentence)
        if not (every or search):
            console.print("--recipes all compares every recipe.")
        for recipe, reason in found.skipped:
            console.print(f"Left out {recipe}: {reason}")
        _write(found, compared, report, with_page, best)


def _shown(model: str) -> str:
    """What to call a model: as it was given, a file by its name."""
    if model == str(DEMO_MODEL):
        return "the demo LM"
    path = Path(model)
    return path.name if path.is_file() else model


def _has_page() -> bool:
    """Whether there are the packages that a report's page is made with; says so early if not."""
    try:
        require_report()
    except ImportError as error:
        console.print(f"--report will be results.csv alone, without a page. {error}", soft_wrap=True)
        return False
    return True


def _write(found: Comparison, recipes: Recipes, report: Path | None, with_page: bool, best: Path | None) -> None:
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


def _questions(words: Path | None, demo: DemoLanguage | None) -> OddOneOutEvaluator | None:
    """The word-sense questions to ask, if any: a file's, or those of the package in a language."""
    if words is not None:
        return OddOneOutEvaluator.from_csv(words)
    return None if demo is None else OddOneOutEvaluator.from_csv(demo_questions(demo))


def _named(texts: Pairs | list[str], data: Path | None, demo: DemoLanguage) -> str:
    """The data, in words."""
    if data is None:
        return f"{len(texts)} demo pairs in {_LANGUAGES[demo]}"
    return f"{len(texts)} {'pairs' if isinstance(texts, Pairs) else 'plain texts'} of {data.name}"


def _searched(backbone: CausalModule, pairs: Pairs, seed: int, batch_size: int) -> Found:
    """The search, with a progress bar while it runs."""
    columns = (
        SpinnerColumn(),
        description(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("Searching", total=None)
        return run_search(
            backbone,
            pairs,
            seed=seed,
            batch_size=batch_size,
            on_progress=lambda what, texts: progress.update(bar, advance=texts, description=f"Searching: {what}"),
        )


class _TimeLeft(ProgressColumn):
    """About how long the rest takes, at the pace of what is done: from the first batch on."""

    def render(self, task: Bar) -> Text:
        if task.total is None or task.elapsed is None or not 0 < task.completed < task.total:
            return Text()
        left = round(task.elapsed * (task.total / task.completed - 1))
        return Text(f"about {left // 60}:{left % 60:02} left", style="progress.remaining")


@contextmanager
def _recipes(backbone: CausalModule, asked: Sequence[Recipe], batch_size: int, total: int | None) -> Iterator[Recipes]:
    """The recipes, with a progress bar while they run."""
    columns = (
        SpinnerColumn(),
        description(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _TimeLeft(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
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
    controls = {result.name: result for result in found.results if result.control}
    random = _with_random(found)
    for task in tasks:
        table.add_column(task.name.replace(" ", "\n"), justify="right", no_wrap=True)
        if random:
            table.add_column("Random", justify="right", style="dim", no_wrap=True)
    table.add_column("Text/s", justify="right", no_wrap=True)
    table.add_column("Cost", justify="right", no_wrap=True)
    shown = [result for result in found.results if not result.recipe.startswith(f"{RANDOM}, ")]
    poolings = list(dict.fromkeys(result.pooling for result in shown))
    shown.sort(key=lambda result: (not result.control, poolings.index(result.pooling)))
    for index, result in enumerate(shown):
        control = controls.get(f"{RANDOM}, {result.name}")
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
    random = "Random: the same on random weights, for the best alone. " if _with_random(found) else ""
    return [
        *notes,
        f"In brackets: 95% intervals. Bold: the best; =: cannot be told from it. {random}Cost: time beside Classical "
        "under the same pooling.",
    ]


def _with_random(found: Comparison) -> bool:
    """Whether anything was run on random weights."""
    return any(result.recipe.startswith(f"{RANDOM}, ") for result in found.results)
