"""``st-reba search``."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .options import Source, option
from .printing import Shown, console, notes


def search(
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
    seed: Annotated[int, option("Seed of the random split of the data into two halves.")] = 0,
    random: options.Random = True,
    dry_run: options.DryRun = False,
    prompt_language: options.PromptLanguage = None,
    out: options.Out = None,
    save_best: options.SaveBest = None,
    batch_size: options.BatchSize = 32,
    max_seq_length: options.MaxSeqLength = None,
    dtype: options.Dtype = "fastest",
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Find the best combination of recipe, layer, pooling and filter.

    All templates, repetitions and changes are tried. The best is chosen on one half of the labelled pairs, triplets,
    queries or texts. Its scores, and those of its controls, are of the other half.
    """
    source = Source(data, columns, queries, corpus, qrels, query_prompt, document_prompt, demo, language)

    from st_reba.compare import Recipes, compare, texts_of
    from st_reba.compare.cost import total_tokens
    from st_reba.compare.search import candidates, forecast, searched, with_selection
    from st_reba.compare.search import search as found_by_halving
    from st_reba.data.tables import Labelled
    from st_reba.lm.backbone import depth
    from st_reba.recipes import Recipe
    from st_reba.text.templates import language_of

    from .load import check_devices, described, in_asked_language, load_fastest, quiet, read
    from .results import forecasted, write_json
    from .show import has_page, kept, running, show, with_command, write

    context.with_resource(quiet())
    with_page = has_page(out)
    check_devices(device)
    labelled = read(source)
    if not isinstance(labelled, Labelled):
        raise ValueError(
            "A search chooses by labels: give --data with scored pairs, triplets, texts with a label each, or a "
            "retrieval task."
        )
    texts = texts_of(labelled)
    tried = [Recipe(row, row.poolings[0]) for row in searched()]
    rows = [recipe.row for recipe in in_asked_language(tried, prompt_language, language_of(texts))]
    backbone = load_fastest(model, texts, dtype=dtype, device=device, max_seq_length=max_seq_length)
    every = candidates(depth(backbone.model), rows)
    expected = forecast(backbone, labelled, every, seed=seed, batch_size=batch_size, random=random)
    (console if dry_run else notes).say(str(expected))
    if dry_run:
        if as_json:
            write_json("forecast", forecasted(expected))
        return
    with Shown("Searching", "texts") as shown:
        chosen = found_by_halving(
            backbone, labelled, every=every, seed=seed, batch_size=batch_size,
            on_progress=lambda what, texts: shown.more(texts, f"Searching: {what}"),
        )  # fmt: skip
    recipes = Recipes(backbone, chosen.recipes(), batch_size=batch_size, kept=kept(out))
    with running(recipes, total_tokens(recipes, texts_of(chosen.held_out), random=random)):
        found = compare(recipes, chosen.held_out, chosen=chosen.chosen, random=random)
    found = with_command(
        with_selection(chosen, found), context.obj, model, f"{described(source, chosen.held_out)}, held out",
        max_seq_length=max_seq_length, unbuilt=True,
    )  # fmt: skip
    show(found)
    write(found, recipes, out, with_page, save_best)
    if as_json:
        write_json("search", found.as_json())
