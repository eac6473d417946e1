"""``st-reba search``."""

from __future__ import annotations

from typing import Annotated

import typer

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
    check_language_model,
    check_places,
    command,
)
from .data import Given


@command("search")
def search_command(
    *,
    model: DemoModelOption,
    given: Given,
    seed: Annotated[int, typer.Option(help="Of the two halves.")] = 0,
    random: RandomOption = True,
    prompt_language: PromptLanguageOption = None,
    out: OutOption = None,
    best: BestOption = None,
    batch_size: BatchOption = 32,
    max_seq_length: LengthOption = None,
    dtype: DtypeOption = Dtype.fastest,
    device: DeviceOption = None,
) -> None:
    """The best of all combinations of template, repetition, change, layer, pooling and filter, for a model and texts.

    It is looked for on one half of the labelled pairs, triplets or queries, and shown beside its controls on the other.
    """
    check_places(out, best)
    given.check()
    check_language_model(model)
