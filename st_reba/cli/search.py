"""``st-reba search``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..compare.run import compare, work
from ..compare.search import Found, with_selection
from ..compare.search import search as run_search
from ..data.demo import DEMO_MODEL, demo_pairs
from ..data.tables import Pairs, read_data
from ..files import check_file
from ..modules import CausalModule, CausalTransformer
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
    OutOption,
    RandomOption,
    app,
    check_devices,
    clear_errors,
    load,
    named,
    placement,
    progress_bar,
)
from .showing import has_page, kept, running, show, typed, write


@app.command("search")
def search_command(
    model: ModelOption = str(DEMO_MODEL),
    data: DataOption = None,
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
    """The best of all combinations of template, repetition, change, layer, pooling and filter, for a model and pairs.

    It is looked for on one half of the labelled pairs, and shown beside its controls on the other.
    """
    with clear_errors():
        with_page = has_page(out, best)
        check_devices(device)
        check_file(data, "--data")
        if language and data:
            raise ValueError("--language chooses among the demo texts: leave it out with --data.")
        demo = Language.en if language is None else language
        pairs = read_data(demo_pairs(demo.value) if data is None else data)
        if not isinstance(pairs, Pairs):
            raise ValueError(
                "A search chooses by labelled pairs: give --data with lines of two texts and a score, separated by "
                "tabs."
            )
        device, dtype = placement(device, dtype)
        backbone = load(CausalTransformer, model, max_seq_length, dtype).to(device)
        chosen = _searched(backbone, pairs, seed, batch_size)
        asked = chosen.recipes()
        total = work(
            backbone,
            asked,
            chosen.held_out.texts(),
            batch_size=batch_size,
            random=random,
        )
        with running(backbone, asked, batch_size, total, kept=kept(out)) as recipes:
            found = compare(recipes, chosen.held_out, chosen=chosen.chosen, random=random)
        on = f"{named(chosen.held_out, data, demo)}, held out"
        found = typed(with_selection(chosen, found), model, on, max_seq_length=max_seq_length, fitted_on_data=True)
        show(found)
        write(found, recipes, out, with_page, best)


def _searched(backbone: CausalModule, pairs: Pairs, seed: int, batch_size: int) -> Found:
    """The search, with a progress bar while it runs."""
    with progress_bar() as progress:
        bar = progress.add_task("Searching", total=None)
        return run_search(
            backbone,
            pairs,
            seed=seed,
            batch_size=batch_size,
            on_progress=lambda what, texts: progress.update(bar, advance=texts, description=f"Searching: {what}"),
        )
