"""What ``st-reba search`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from st_reba.compare import Recipes, compare, texts_of
from st_reba.compare.cost import total_tokens
from st_reba.compare.search import Found, candidates, searched, with_selection
from st_reba.compare.search import search as run_search
from st_reba.data.tables import Labelled
from st_reba.lm.backbone import depth
from st_reba.modules import CausalModule, CausalTransformer
from st_reba.recipes import Recipe, Row
from st_reba.text.templates import language_of

from ..common import Dtype, Language
from ..data import Given
from ..printing import Shown
from .given import described, read
from .models import check_devices, load_fastest
from .prompts import in_asked_language
from .showing import has_page, kept, running, show, typed, write


def run(
    *,
    model: str,
    given: Given,
    seed: int,
    random: bool,
    prompt_language: Language | None,
    out: Path | None,
    best: Path | None,
    batch_size: int,
    max_seq_length: int | None,
    dtype: Dtype,
    device: str | None,
) -> None:
    """Search, show what was found beside its controls, and write it."""
    with_page = has_page(out)
    check_devices(device)
    labelled = read(given)
    if not isinstance(labelled, Labelled):
        raise ValueError("A search chooses by labels: give --data with scored pairs, triplets, or a retrieval task.")
    rows = _rows(prompt_language, labelled)
    backbone = load_fastest(CausalTransformer, model, max_seq_length, dtype, device, texts_of(labelled))
    chosen = _searched(backbone, labelled, rows, seed, batch_size)
    recipes = Recipes(backbone, chosen.recipes(), batch_size=batch_size, kept=kept(out))
    with running(recipes, total_tokens(recipes, texts_of(chosen.held_out), random=random)):
        found = compare(recipes, chosen.held_out, chosen=chosen.chosen, random=random)
    on = f"{described(given, chosen.held_out)}, held out"
    found = typed(with_selection(chosen, found), model, on, max_seq_length=max_seq_length, fitted_on_data=True)
    show(found)
    write(found, recipes, out, with_page, best)


def _rows(prompt_language: Language | None, data: Labelled) -> list[Row]:
    """What is tried, with prompts in the language that is asked for, or in that of the texts."""
    recipes = [Recipe(row, row.poolings[0]) for row in searched()]
    return [recipe.row for recipe in in_asked_language(recipes, prompt_language, language_of(texts_of(data)))]


def _searched(backbone: CausalModule, data: Labelled, rows: Sequence[Row], seed: int, batch_size: int) -> Found:
    """The search, with a progress bar while it runs."""
    with Shown() as progress:
        bar = progress.add_task("Searching", total=None, unit="texts")
        return run_search(
            backbone,
            data,
            every=candidates(depth(backbone.model), rows),
            seed=seed,
            batch_size=batch_size,
            on_progress=lambda what, texts: progress.update(bar, advance=texts, description=f"Searching: {what}"),
        )
