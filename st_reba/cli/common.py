"""What the commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console
from sentence_transformers.util import get_device_name
from transformers.utils import logging as transformers_logging

from ..modules import CausalModule

app = typer.Typer(
    name="st-reba",
    help="Text embeddings from decoder-only language models, without training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
console = Console()


class PoolingMode(str, Enum):
    mean = "mean"
    last = "last"
    lasttoken = "lasttoken"
    weightedmean = "weightedmean"
    max = "max"
    cls = "cls"


class Dtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


ModelOption = Annotated[str, typer.Option("--model", help="A decoder-only model: a directory or a Hub id.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Weights' precision; auto: float32 on a CPU, else the model's own.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, mps ...; the fastest there is by default.")]
LengthOption = Annotated[int | None, typer.Option(help="Tokens of one copy of a text, at most.", min=1)]


def placement(device: str | None, dtype: Dtype) -> tuple[str, Dtype]:
    """Where to run and in which precision, when that is left to us."""
    device = device or get_device_name()
    return device, Dtype.float32 if dtype is Dtype.auto and device == "cpu" else dtype


def load(
    module_class: type[CausalModule],
    model: str,
    max_seq_length: int | None,
    dtype: Dtype,
    **settings: object,
) -> CausalModule:
    transformers_logging.disable_progress_bar()
    module = module_class(model, model_kwargs={"dtype": dtype.value}, **settings)  # type: ignore[arg-type]
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    return module


@contextmanager
def clear_errors() -> Iterator[None]:
    """What a user can mend is said in a sentence; anything else keeps its trace."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        Console(stderr=True).print(f"[red]Error:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def marked(text: str, best: bool) -> str:
    return f"[bold green]{text}[/]" if best else text
