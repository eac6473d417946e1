"""``st-reba compare``."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from . import options
from .options import directory, file, model_or_demo, option, refuse, source
from .printing import console, model_name, notes, write_json


def compare(
    context: typer.Context,
    model: options.Model = None,
    data: Annotated[
        str | None,
        source(
            "Texts: pairs with scores, triplets, or texts with one label each. A .tsv, .csv, .jsonl or .parquet file, "
            "a folder of shards, a remote path (s3://, hf://, https://), a dataset on the Hub, or a folder in BEIR's "
            "layout. Default: demo texts."
        ),
    ] = None,
    columns: options.Columns = None,
    separator: options.Separator = None,
    query_prompt: options.QueryPrompt = None,
    document_prompt: options.DocumentPrompt = None,
    demo: Annotated[
        Literal["pairs", "pairs-zh", "retrieval", "retrieval-zh"],
        option("Demo texts to use without --data, in English or Chinese."),
    ] = "pairs",
    words: Annotated[
        Path | None, file("A CSV of word-sense questions to ask beside the data (columns: 问题,选项1,...,选项4,答案).")
    ] = None,
    recipes: Annotated[
        list[str] | None,
        option(
            'Recipes to compare: "few", those most worth trying (the default); "all"; or names or keys, as for st-reba '
            'build --recipe, with commas ("reba-2,echo-2") or an option each.'
        ),
    ] = None,
    fit_texts: options.FitTexts = None,
    choose: Annotated[
        bool, option("Try layers, words and weights of each recipe: half of the data chooses, the other is scored.")
    ] = True,
    prompt_language: options.PromptLanguage = None,
    controls: Annotated[
        bool, option("Also score tf-idf, the input embeddings alone, and the best recipes on random weights.")
    ] = True,
    margin: Annotated[
        float, option("A cheaper recipe is as good if it is surely less than this many points behind.", min=0)
    ] = 1.0,
    seed: Annotated[int, option("Seed of the splits into halves.", min=0)] = 0,
    dry_run: Annotated[
        bool, option("Only print how long the command would take, and how much memory.", "--dry-run")
    ] = False,
    against: Annotated[Path | None, file("An older comparison.json: show what has changed since.")] = None,
    saved: Annotated[Path | None, file("A saved comparison.json to show. Nothing is run.")] = None,
    out: Annotated[
        Path | None,
        directory(
            "Directory to write report.html, results.csv and comparison.json to. "
            "If a run is stopped, the same command resumes it from DIR.partial.",
            "--out",
        ),
    ] = None,
    save_best: Annotated[
        Path | None, directory("Directory to write the best recipe to, ready to load.", "--save-best")
    ] = None,
    batch_size: options.BatchSize = 32,
    max_seq_length: options.MaxSeqLength = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    engine: options.Engine = "transformers",
    as_json: options.Json = False,
) -> None:
    """Find the recipe that suits a model and texts, with controls.

    The answer is the first line. Scores have 95% intervals. Without --data it runs on labelled texts in the package.
    """
    if saved is not None:
        why = "--saved runs nothing, and goes with --against, --out and --json alone"
        refuse(context, why, but=("--saved", "--against", "--out", "--json"))
    if engine == "llama.cpp":
        refuse(context, "llama.cpp runs a file's weights as they are, where it runs", "--dtype", "--device")
    if data is not None:
        refuse(context, "it chooses among the demo texts, and there are data of your own", "--demo")
    else:
        refuse(context, "it is for the table of --data", "--columns", "--separator")
    if out == save_best:
        refuse(context, "it is the directory of --out, too", "--save-best")
    name = "" if saved is not None else model_or_demo(model)

    from st_reba.compare import Splits, forecast, prepared, texts_of
    from st_reba.compare import compare as compared
    from st_reba.compare.answer import build_command
    from st_reba.compare.results import Comparison, check_same_metric
    from st_reba.compare.splits import LEAST_TEXTS
    from st_reba.recipes import asked_for
    from st_reba.text.presets import language_of

    from . import load as loading
    from .show import kept, present, running

    context.with_resource(loading.quiet())
    old = None if against is None else Comparison.load(against)
    if saved is not None:
        present(Comparison.load(saved), old, out, as_json)
        return
    loading.check_devices(device)
    labelled = loading.read(data, columns, separator, demo, loading.prompts_of(query_prompt, document_prompt))
    splits = Splits.of(labelled, choose=choose, seed=seed)
    if old is not None:
        check_same_metric(splits.tasks[-1].scores[0].column, old.tasks[0])
    questions = loading.questions(words, data, demo)
    fit_on = loading.texts_to_fit(fit_texts) if fit_texts else []
    asked = asked_for(recipes or ["few"], fit_texts=fit_on)
    asked = loading.in_asked_language(asked, prompt_language, language_of(texts_of(splits.data)))
    fitted = any(recipe.fitted for recipe in asked)
    if not controls and not fitted:
        refuse(context, "it is for tf-idf and recipes that are fitted on texts, such as early-late", "--fit-texts")
    if not controls and not any(recipe.words for recipe in asked):
        refuse(context, "none of the recipes has embeddings of words, as echo-2 has", "--words")
    # The demo's texts are the package's own.
    fits_own = data is not None and not fit_texts
    if fits_own and fitted and splits.chooses and not splits.fit_on:
        notes.say(
            f"A half of the data has fewer than {LEAST_TEXTS} texts, so filters are fitted on sentences of the "
            "package: give more texts, or --fit-texts."
        )
    cache = context.with_resource(kept(None if dry_run else out))
    backbone = loading.load_backbone(name, engine, dtype, device, max_seq_length)
    run = prepared(backbone, asked, splits, fits_own=fits_own, batch_size=batch_size, controls=controls, kept=cache)
    # Weights in a GGUF file are not drawn anew.
    random = controls and engine == "transformers"
    expected = forecast(run, texts_of(splits.data), questions, random)
    if dry_run:
        console.say(str(expected))
        if as_json:
            write_json("forecast", **asdict(expected), seconds=expected.seconds)
        return
    notes.say(str(expected))
    with running(run, expected.tokens):
        result = compared(run, splits, questions, fit_texts=fit_on or None, random=random, margin=margin / 100)
    result = replace(result, model=model_name(name), data=loading.described(data, demo, labelled), command=context.obj)
    if result.use:
        engines = {"--engine": engine} if engine == "llama.cpp" else {"--dtype": result.settings.get("precision")}
        runs = {"--model": name, **engines, "--max-seq-length": max_seq_length}
        fits = {"--fit-texts": fit_texts}
        if fits_own and splits.fit_on:
            fits = {"--fit-texts": data, "--columns": columns, "--separator": separator}
        result = replace(result, build=build_command(result.choice(), runs, fits, result.prompts))
    hints = [] if recipes else ["--recipes all compares every recipe."]
    present(result, old, out, as_json, hints, run, save_best)
