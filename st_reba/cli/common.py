"""What the commands share."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Task as Bar
from rich.text import Text
from safetensors import SafetensorError
from sentence_transformers.util import get_device_name
from transformers.utils import logging as transformers_logging

from ..compare.precision import AGREED, agreement, cosines, sampled
from ..files import is_full
from ..lm.gguf import is_gguf
from ..lm.precision import fastest_on_cpu
from ..modules import CausalModule, CausalTransformer

app = typer.Typer(
    name="st-reba",
    help="Text embeddings from decoder-only language models, without training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
# What is printed is never markup, nor an emoji: paths and messages have brackets and colons. Styles are rich's Text.
console = Console(markup=False, emoji=False, highlight=False)
#: What is no result: errors, and what is told on the way. The first line of the output is the answer.
notes = Console(stderr=True, markup=False, emoji=False, highlight=False)


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
    fastest = "fastest"


class Language(str, Enum):
    en = "en"
    zh = "zh"


ModelOption = Annotated[str, typer.Option("--model", help="A decoder-only model: a directory or a Hub id.")]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        help="Weights' precision; auto: float32 on a CPU, else the model's own; fastest: the same, but bfloat16 on a "
        "CPU that has units for it."
    ),
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, mps ...; the fastest there is by default.")]
LengthOption = Annotated[int | None, typer.Option(help="Tokens of one copy of a text, at most.", min=1)]
BatchOption = Annotated[int, typer.Option(help="Texts at a time.", min=1)]
LanguageOption = Annotated[
    Language | None, typer.Option(help="Of the demo texts: English (the default) or Chinese.", show_default=False)
]
RandomOption = Annotated[
    bool,
    typer.Option(
        "--random/--no-random",
        help="Run the best recipes, at most 3, on random weights as well: what of a score needs no training.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "--report",
        help="Directory to write report.html, its figures, results.csv and comparison.json to. What was embedded lies "
        "beside it while that runs: the same command goes on where it was stopped.",
    ),
]
BestOption = Annotated[
    Path | None, typer.Option("--save-best", help="Directory to write the best recipe to, ready to load.")
]


def check_devices(device: str | None) -> None:
    """See that PyTorch can put something on a device, or on several with commas between.

    Raises:
        ValueError: If it cannot, with what it says.
    """
    names = [] if device is None else [part.strip() for part in device.split(",")]
    if len({name.partition(":")[0] for name in names}) > 1:
        # What runs on several refuses different kinds, in words of its own.
        return
    for name in names:
        try:
            # What a device computes comes back; "meta" takes everything and computes nothing.
            torch.zeros(1, device=name, dtype=torch.float32).item()
        # Each backend refuses with an error of another type.
        except Exception as error:
            raise ValueError(
                f"--device {name}: PyTorch {torch.__version__} cannot use it here ({_first_line(error)}). Give cpu, or "
                f"one that is there; without --device it is {get_device_name()}."
            ) from error


#: What a directory with a model has at least one of: a language model, a SentenceTransformer, an adapter.
_MODEL_FILES = ("config.json", "modules.json", "adapter_config.json")


def check_model(model: str) -> None:
    """See that a model's name is a directory with a model, or may be a Hub id.

    Raises:
        ValueError: If it is a file, or a directory without a model, or can only be a path and nothing is there.
    """
    if is_gguf(model):
        return
    path = Path(model)
    if path.is_file():
        raise ValueError(f"The model {model} is a file: give the directory that it lies in.")
    if path.is_dir():
        if not any(path.iterdir()):
            raise ValueError(f"The model {model} is an empty directory: give one that a model was saved to.")
        if not any((path / name).is_file() for name in _MODEL_FILES):
            if file := next(path.glob("*.gguf"), None):
                raise ValueError(f"The model {model} is a directory with a GGUF file: give the file, {file}.")
            raise ValueError(
                f"The model {model} is a directory without a model (none of {', '.join(_MODEL_FILES)}): give one that "
                "`save_pretrained` or `st-reba build` has written."
            )
    elif model.startswith((".", "/", "~", "\\")) or "\\" in model or model.count("/") > 1:
        raise ValueError(f"The model {model}: there is no such directory. Check the path, or give a Hub id (org/name).")


#: What says that a model did not come from the Hub.
_HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled)


@contextmanager
def usable(model: str, device: str | None = None) -> Iterator[None]:
    """Check model and devices; if the model then does not come from the Hub, say so by its name.

    Raises:
        ValueError: As :func:`check_model` and :func:`check_devices`; or if the model's weights cannot be read.
        OSError: If the Hub does not give the model.
    """
    check_devices(device)
    check_model(model)
    try:
        yield
    except OSError as error:
        said = error.__cause__ or error.__context__ or error
        if Path(model).is_dir() or not isinstance(said, _HUB_ERRORS):
            raise
        raise OSError(
            f"The model {model}: there is no such directory, and it cannot be had from the Hub "
            f"({_first_line(said)}). Check the name, or give a directory."
        ) from error
    except SafetensorError as error:
        if is_full(error):
            raise
        raise ValueError(
            f"The model {model}: its weights are damaged or cut short ({_first_line(error)}). Fetch or save it again."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def placement(device: str | None, dtype: Dtype) -> tuple[str, Dtype]:
    """Where to run and in which precision, when that is left to us."""
    device = device or get_device_name()
    if dtype is Dtype.fastest:
        dtype = Dtype(str(fastest_on_cpu()).removeprefix("torch.")) if device == "cpu" else Dtype.auto
    return device, Dtype.float32 if dtype is Dtype.auto and device == "cpu" else dtype


def load(
    module_class: type[CausalModule],
    model: str,
    max_seq_length: int | None,
    dtype: Dtype,
    **settings: object,
) -> CausalModule:
    transformers_logging.disable_progress_bar()
    with usable(model):
        module = module_class(model, model_kwargs={"dtype": dtype.value}, **settings)  # type: ignore[arg-type]
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    return module


def load_fastest(
    model: str, max_seq_length: int | None, dtype: Dtype, device: str | None, texts: Sequence[str]
) -> CausalModule:
    """A model to be run: where bfloat16 would be the fastest, in that if on some of the texts it says the same."""
    fastest = dtype is Dtype.fastest
    device, dtype = placement(device, dtype)
    if not fastest or dtype is not Dtype.bfloat16:
        return load(CausalTransformer, model, max_seq_length, dtype).to(device)
    sample = sampled(texts)
    # One after the other: memory may have no room for both.
    wanted = cosines(load(CausalTransformer, model, max_seq_length, Dtype.float32).to(device), sample)
    gc.collect()
    backbone = load(CausalTransformer, model, max_seq_length, Dtype.bfloat16).to(device)
    alike = agreement(wanted, cosines(backbone, sample))
    told = f"the cosines of {len(sample)} of the texts are in the order of those of float32 up to {alike:.3f}"
    if alike >= AGREED:
        notes.print(f"In bfloat16: {told}.", soft_wrap=True)
        return backbone
    notes.print(f"In float32, as bfloat16 does not agree: {told}, and {AGREED} is asked for.", soft_wrap=True)
    del backbone
    return load(CausalTransformer, model, max_seq_length, Dtype.float32).to(device)


@contextmanager
def clear_errors() -> Iterator[None]:
    """What a user can mend is said in a sentence; anything else keeps its trace."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        said: object = error
        if is_full(error):
            said = f"The disk is full ({error}): make room, also for temporary files (TMPDIR)."
        notes.print(Text.assemble(("Error:", "red"), f" {said}"), soft_wrap=True)
        raise typer.Exit(1) from None


class _TimeLeft(ProgressColumn):
    """About how long the rest takes, at the pace of what is done: from the first batch on."""

    def render(self, task: Bar) -> Text:
        if task.total is None or task.elapsed is None or not 0 < task.completed < task.total:
            return Text()
        left = round(task.elapsed * (task.total / task.completed - 1))
        return Text(f"about {left // 60}:{left % 60:02} left", style="progress.remaining")


def progress_bar(counted: ProgressColumn | None = None) -> Progress:
    """How far a command is, while it runs.

    Args:
        counted: Says how much is done; None: so many of so many.
    """
    # A task's or a model's name is no markup here either.
    what = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), what, BarColumn(), counted or MofNCompleteColumn(), TimeElapsedColumn(), _TimeLeft())
    return Progress(*columns, console=notes, transient=True)


def marked(text: str, best: bool) -> Text:
    return Text(text, style="bold green" if best else "")
