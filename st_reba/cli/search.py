"""``st-reba search``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..compare.run import compare, texts_of, work
from ..compare.search import Found, with_selection
from ..compare.search import search as run_search
from ..data.demo import DEMO_MODEL
from ..data.tables import Labelled
from ..modules import CausalModule, CausalTransformer
from .common import (
    BatchOption,
    BestOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    LanguageOption,
    LengthOption,
    ModelOption,
    OutOption,
    RandomOption,
    app,
    check_devices,
    clear_errors,
    load,
    placement,
    progress_bar,
)
from .data import (
    ColumnsOption,
    CorpusOption,
    DataOption,
    DemoOption,
    DocumentPromptOption,
    QrelsOption,
    QueriesOption,
    QueryPromptOption,
    described,
    given,
)
from .showing import has_page, kept, running, show, typed, write


@app.command("search")
def search_command(
    model: ModelOption = str(DEMO_MODEL),
    data: DataOption = None,
    columns: ColumnsOption = None,
    queries: QueriesOption = None,
    corpus: CorpusOption = None,
    qrels: QrelsOption = None,
    query_prompt: QueryPromptOption = None,
    document_prompt: DocumentPromptOption = None,
    demo: DemoOption = None,
    language: LanguageOption = None,
    seed: Annotated[int, typer.Option(help="Of the two halves.")] = 0,
    random: RandomOption = True,
    out: OutOption = None,
    best: BestOption = None,
    batch_size: BatchOption = 32,
    max_seq_length: LengthOption = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
) -> None:
    """The best of all combinations of template, repetition, change, layer, pooling and filter, for a model and texts.

    It is looked for on one half of the labelled pairs, triplets or queries, and shown beside its controls on the other.
    """
    with clear_errors():
        with_page = has_page(out, best)
        check_devices(device)
        labelled, _ = given(
            data, columns=columns, queries=queries, corpus=corpus, qrels=qrels, demo=demo, language=language,
            query_prompt=query_prompt, document_prompt=document_prompt,
        )  # fmt: skip
        if not isinstance(labelled, Labelled):
            raise ValueError(
                "A search chooses by labels: give --data with scored pairs, triplets, or a retrieval task."
            )
        device, dtype = placement(device, dtype)
        backbone = load(CausalTransformer, model, max_seq_length, dtype).to(device)
        chosen = _searched(backbone, labelled, seed, batch_size)
        asked = chosen.recipes()
        total = work(backbone, asked, texts_of(chosen.held_out), batch_size=batch_size, random=random)
        with running(backbone, asked, batch_size, total, kept=kept(out)) as recipes:
            found = compare(recipes, chosen.held_out, chosen=chosen.chosen, random=random)
        on = f"{described(chosen.held_out, data, queries, language)}, held out"
        found = typed(with_selection(chosen, found), model, on, max_seq_length=max_seq_length, fitted_on_data=True)
        show(found)
        write(found, recipes, out, with_page, best)


def _searched(backbone: CausalModule, data: Labelled, seed: int, batch_size: int) -> Found:
    """The search, with a progress bar while it runs."""
    with progress_bar() as progress:
        bar = progress.add_task("Searching", total=None)
        return run_search(
            backbone,
            data,
            seed=seed,
            batch_size=batch_size,
            on_progress=lambda what, texts: progress.update(bar, advance=texts, description=f"Searching: {what}"),
        )
