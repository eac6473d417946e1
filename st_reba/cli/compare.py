"""``st-reba compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..catalogue import asked_for
from ..compare.mteb import resolve_tasks
from ..compare.run import compare, compare_tasks, work
from ..data.demo import DEMO_MODEL, demo_pairs, demo_questions, demo_sentences
from ..data.tables import Pairs, read_data, read_texts
from ..evaluation import OddOneOutEvaluator
from ..files import check_file
from ..modules import CausalTransformer
from .common import (
    BatchOption,
    BestOption,
    DataOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    Language,
    LanguageOption,
    LengthOption,
    ModelOption,
    RandomOption,
    ReportOption,
    app,
    check_devices,
    clear_errors,
    console,
    load,
    named,
    placement,
)
from .search import search_command
from .several import ManyTasks
from .showing import has_page, running, show, shown_model, write

# With --recipes all.
_REPETITIONS = 3


@app.command("compare", cls=ManyTasks)
def compare_command(
    model: ModelOption = str(DEMO_MODEL),
    data: DataOption = None,
    language: LanguageOption = None,
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
        list[str] | None,
        typer.Option(
            help='"few": those most worth trying (the default); "all" there are; or names or keys, as for '
            "st-reba build --recipe: any number of options, or keys with commas between.",
            show_default=False,
        ),
    ] = None,
    search: Annotated[bool, typer.Option("--search", hidden=True)] = False,
    seed: Annotated[int, typer.Option(hidden=True)] = 0,
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
    random: RandomOption = True,
    report: ReportOption = None,
    best: BestOption = None,
    batch_size: BatchOption = 32,
    max_seq_length: LengthOption = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
) -> None:
    """Which recipe suits a model and texts: recipes beside their controls, with 95% intervals, and an answer first.

    Without --model and --data it runs offline, on the small language model and the labelled texts in the package.
    """
    with clear_errors():
        if search:
            _search_instead(
                mteb or words or fit_texts or recipes or repetitions,
                model=model, data=data, language=language, seed=seed, random=random, report=report, best=best,
                batch_size=batch_size, max_seq_length=max_seq_length, dtype=dtype, device=device,
            )  # fmt: skip
            return
        if mteb and (data or words):
            raise ValueError("--mteb brings its own texts: leave --data and --words out, or run twice.")
        if mteb_results and not mteb:
            raise ValueError("--mteb-results is for --mteb, which names the tasks.")
        with_page = has_page(report, best)
        check_devices(device)
        for path, called in ((data, "--data"), (words, "--words"), (fit_texts, "--fit-texts")):
            check_file(path, called)
        every = "all" in (recipes or [])
        if repetitions and not every:
            raise ValueError("--repetitions is for --recipes all: the few have at most two copies of a text.")
        if language and (data or mteb):
            raise ValueError("--language chooses among the demo texts: leave it out with --data and --mteb.")
        demo = Language.en if language is None else language
        tasks = resolve_tasks(mteb) if mteb else []
        texts = read_data(demo_pairs(demo.value) if data is None else data)
        if best is not None and not tasks and not isinstance(texts, Pairs):
            raise ValueError(
                "--save-best needs labels, and plain texts have none: use st-reba build to choose yourself."
            )
        questions = None if tasks else _questions(words, demo if data is None else None)
        fit_on = None if fit_texts is None else read_texts(fit_texts)
        plain = demo_sentences(None if data or tasks else demo.value) if fit_on is None else fit_on
        asked = asked_for(recipes or ["few"], repetitions or _REPETITIONS, plain)
        device, dtype = placement(device, dtype)
        backbone = load(CausalTransformer, model, max_seq_length, dtype).to(device)
        total = None if tasks else work(texts, questions, batch_size, random)
        with running(backbone, asked, batch_size, total) as compared:
            if tasks:
                found = compare_tasks(compared, tasks, model=shown_model(model), output=mteb_results, random=random)
                measured_on = f"{len(tasks)} tasks of mteb"
            else:
                found = compare(compared, texts, questions, fit_texts=fit_on, random=random)
                measured_on = named(texts, data, demo)
        hints = [] if recipes else ["--recipes all compares every recipe."]
        write(show(found, model, measured_on, hints), compared, report, with_page, best)


def _questions(words: Path | None, demo: Language | None) -> OddOneOutEvaluator | None:
    """The word-sense questions to ask, if any: a file's, or those of the package in a language."""
    if words is not None:
        return OddOneOutEvaluator.from_csv(words)
    return None if demo is None else OddOneOutEvaluator.from_csv(demo_questions(demo.value))


def _search_instead(more: object, **options: Any) -> None:
    """What ``--search`` did before searching had a command of its own."""
    console.print("compare --search is deprecated and will go: use st-reba search.", style="yellow", soft_wrap=True)
    if more:
        raise ValueError(
            "A search chooses by labelled pairs among combinations of its own, and fits on those texts: leave --mteb, "
            "--words, --fit-texts, --recipes and --repetitions out."
        )
    search_command(**options)
