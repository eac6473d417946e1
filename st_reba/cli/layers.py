"""``st-reba layers``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..data.demo import DEMO_MODEL
from ..files import check_free
from .common import (
    DeviceOption,
    Dtype,
    DtypeOption,
    LengthOption,
    ModelOption,
    PoolingMode,
    check_model,
    command,
)
from .data import Given


@command("layers")
def layers_command(
    *,
    model: ModelOption = str(DEMO_MODEL),
    given: Given,
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet, or be empty.")] = Path(
        "st-reba-layers"
    ),
    pooling: Annotated[PoolingMode, typer.Option(help="How token vectors become one.")] = PoolingMode.mean,
    template: Annotated[
        str | None, typer.Option(help='Text with {text} slots, or a name such as "springer" or "prompteol".')
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 32,
    max_seq_length: LengthOption = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
) -> None:
    """After which layer a model embeds best, and how much its tokens share: tables and plots.

    Without --model and --data it runs offline, on the small language model and the labelled texts in the package.
    """
    check_free(out, "--out")
    given.check()
    check_model(model)
