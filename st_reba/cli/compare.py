"""``st-reba compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..catalogue import Recipe, asked_for
from ..compare.mteb import resolve_tasks
from ..compare.results import Comparison
from ..compare.run import compare, compare_tasks, texts_of, work
from ..compare.workload import Forecast, memory, speed
from ..data.demo import DEMO_MODEL, demo_pairs, demo_questions, demo_sentences
from ..data.tables import Pairs, read_data, read_texts
from ..evaluation import OddOneOutEvaluator
from ..files import check_file
from ..modules import CausalModule
from .common import (
    BatchOption,
    BestOption,
    DataOption,
    DeviceOption,
    Dtype,
    Language,
    LanguageOption,
    LengthOption,
    ModelOption,
    OutOption,
    RandomOption,
    app,
    check_devices,
    clear_errors,
    console,
    load_fastest,
    named,
    notes,
)
from .search import search_command
from .several import Several
from .showing import has_page, kept, running, show, show_changes, shown_model, typed, write

# With --recipes all.
_REPETITIONS = 3


@app.command("compare", cls=Several)
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
            help='"few": those most worth trying (the default); "all" there are; or any number of names or keys, as '
            "for st-reba build --recipe.",
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
    controls: Annotated[
        bool,
        typer.Option(
            "--controls/--no-controls",
            help="Compare with tf-idf, with the input embeddings alone, and with random weights.",
        ),
    ] = True,
    random: RandomOption = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how long it would take, and how much memory, and stop there.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="A saved comparison.json that this one is held against: what has changed?")
    ] = None,
    saved: Annotated[
        Path | None, typer.Option(help="A saved comparison.json to show, instead of comparing anew.")
    ] = None,
    out: OutOption = None,
    best: BestOption = None,
    batch_size: BatchOption = 32,
    max_seq_length: LengthOption = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Weights' precision; fastest: bfloat16 on a CPU that has units for it, if on some of the texts the "
            "scores agree with those of float32; auto: float32 on a CPU, else the model's own."
        ),
    ] = Dtype.fastest,
    device: DeviceOption = None,
) -> None:
    """Which recipe suits a model and texts: recipes beside their controls, with 95% intervals, and an answer first.

    Without --model and --data it runs offline, on the small language model and the labelled texts in the package.
    """
    with clear_errors():
        if search:
            _search_instead(
                mteb or words or fit_texts or recipes or repetitions or dry_run or against or saved,
                model=model, data=data, language=language, seed=seed, random=random, out=out, best=best,
                batch_size=batch_size, max_seq_length=max_seq_length, dtype=dtype, device=device,
            )  # fmt: skip
            return
        old = None if against is None else Comparison.load(against)
        if saved is not None:
            found = Comparison.load(saved)
            show(found)
            if old is not None:
                show_changes(found, old)
            return
        if mteb and (data or words):
            raise ValueError("--mteb brings its own texts: leave --data and --words out, or run twice.")
        if mteb and dry_run:
            raise ValueError("--dry-run counts the texts of --data: mteb's are not known before they are run.")
        if mteb_results and not mteb:
            raise ValueError("--mteb-results is for --mteb, which names the tasks.")
        with_page = has_page(out, best)
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
        random = random and controls
        backbone = load_fastest(model, max_seq_length, dtype, device, plain if tasks else texts_of(texts))
        total = None
        if not tasks:
            forecast = _forecast(backbone, asked, texts_of(texts), questions, batch_size, random)
            (console if dry_run else notes).print(str(forecast), soft_wrap=True)
            total = forecast.tokens
        if dry_run:
            return
        store = None if tasks else kept(out)
        with running(backbone, asked, batch_size, total, controls=controls, kept=store) as compared:
            if tasks:
                found = compare_tasks(compared, tasks, model=shown_model(model), output=mteb_results, random=random)
                measured_on = f"{len(tasks)} tasks of mteb"
            else:
                found = compare(compared, texts, questions, fit_texts=fit_on, random=random)
                measured_on = named(texts, data, demo)
        hints = [] if recipes else ["--recipes all compares every recipe."]
        found = typed(found, model, measured_on, fit_texts=fit_texts, max_seq_length=max_seq_length)
        show(found, hints)
        write(found, compared, out, with_page, best)
        if old is not None:
            show_changes(found, old)


def _forecast(
    backbone: CausalModule,
    asked: Sequence[Recipe],
    texts: Sequence[str],
    questions: OddOneOutEvaluator | None,
    batch_size: int,
    random: bool,
) -> Forecast:
    """What a comparison will take, after a moment of measuring."""
    words = [] if questions is None else questions.inputs()[0]
    tokens = work(backbone, asked, texts, words, batch_size=batch_size, random=random)
    lengths = [len(ids) for ids in backbone.token_ids(texts)]
    copies = max((recipe.copies or 1 for recipe in asked), default=1)
    weights, peak = memory(backbone, max(lengths), batch_size, copies, random)
    measured = speed(backbone, list(zip(lengths, texts, strict=True)), batch_size)
    return Forecast(len(asked), len(texts), tokens, measured, weights, peak)


def _questions(words: Path | None, demo: Language | None) -> OddOneOutEvaluator | None:
    """The word-sense questions to ask, if any: a file's, or those of the package in a language."""
    if words is not None:
        return OddOneOutEvaluator.from_csv(words)
    return None if demo is None else OddOneOutEvaluator.from_csv(demo_questions(demo.value))


def _search_instead(more: object, **options: Any) -> None:
    """What ``--search`` did before searching had a command of its own."""
    notes.print("compare --search is deprecated and will go: use st-reba search.", style="yellow", soft_wrap=True)
    if more:
        raise ValueError(
            "A search chooses by labelled pairs among combinations of its own, and fits on those texts: leave --mteb, "
            "--words, --fit-texts, --recipes and --repetitions out."
        )
    search_command(**options)
