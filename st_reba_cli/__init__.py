"""The ``st-reba`` command: one file a subcommand; here, all of them, and how errors and warnings are told."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from . import build, compare, encode, export, push, recipes, serve, train, verify
from .options import option
from .printing import console, notes, printable

#: The options that ``--help`` shows of commands that have many; ``--help-all`` shows all of them.
USUAL = {
    "build": (
        "--out", "--model", "--recipe", "--pooling", "--template", "--fit-texts", "--sparse", "--rerank",
        "--multi-vector", "--dtype", "--engine", "--json",
    ),
    "compare": (
        "--model", "--data", "--columns", "--recipes", "--fit-texts", "--out", "--save-best", "--dry-run", "--json",
    ),
    "encode": (
        "--out", "--column", "--keep", "--precision", "--normalize", "--prompt-name", "--batch-size", "--dtype",
        "--device", "--overwrite", "--json",
    ),
    "serve": ("--rerank", "--name", "--host", "--port", "--api-key", "--dtype", "--device"),
}  # fmt: skip
_HELP_ALL = "--help-all"


class Commands(TyperGroup):
    """All subcommands. What a user can put right is told in a sentence; anything else keeps its trace."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # The page of a comparison shows it.
        ctx.obj = shlex.join(["st-reba", *args])
        # Then stdout is the object's alone.
        console.stderr = "--json" in args
        # A shell that completes an option is told of all.
        shows_all = _HELP_ALL in args or ctx.resilient_parsing
        for name in USUAL.keys() & self.commands.keys():
            for parameter in self.commands[name].params:
                if parameter.param_type_name == "option":
                    parameter.hidden = not (shows_all or parameter.opts[0] in USUAL[name])  # type: ignore[attr-defined]
        return super().parse_args(ctx, ["--help" if word == _HELP_ALL else word for word in args])

    def make_context(self, *args: Any, **settings: Any) -> Any:
        with _escaped():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings(), _escaped():
            warnings.showwarning = _noted
            try:
                return super().invoke(ctx)
            except (ValueError, OSError, ImportError) as error:
                if ctx.params.get("traceback"):
                    raise
                # A command that has written something has imported st_reba; a refusal need not wait for it.
                files = sys.modules.get("st_reba.files")
                full = f"The disk is full ({error}): make room, also for temporary files (TMPDIR)."
                said = full if files is not None and files.is_full(error) else error
                notes.say(Text.assemble(("Error:", "red"), f" {said}"))
                raise typer.Exit(1) from None


@contextmanager
def _escaped() -> Iterator[None]:
    """What was mistyped is shown with its control characters escaped: a shell hands on whatever names files have. What
    pydantic calls its errors, which typer hands on, is left out."""
    try:
        yield
    except Exception as error:
        # Errors of usage are of other classes in other versions of typer, and each has a message.
        if isinstance(message := getattr(error, "message", None), str):
            error.message = printable(message.removeprefix("Value error, "))  # type: ignore[attr-defined]
        raise


def _noted(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """A warning without the place in the code that gave it; those that are for programmers are left out."""
    if not issubclass(category, (DeprecationWarning, PendingDeprecationWarning)):
        notes.say(Text.assemble(("Note:", "yellow"), f" {message}"))


app = typer.Typer(
    name="st-reba",
    cls=Commands,
    help="Text embeddings from decoder-only language models, without training.",
    no_args_is_help=True,
    # rich's tables cut the names of options where a terminal is narrow.
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)
for command in (
    build.build, compare.compare, encode.encode, export.export, push.push,
    recipes.recipes, serve.serve, train.train, verify.verify,
):  # fmt: skip
    # compare has a sentence for what stands behind an option's value.
    more = f"All options: st-reba {command.__name__} {_HELP_ALL}" if command.__name__ in USUAL else None
    app.command(context_settings={"allow_extra_args": command is compare.compare}, epilog=more)(command)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, option("Show the version and exit.", "--version")] = False,
    traceback: Annotated[bool, option("Show where in the code an error was raised.", "--traceback")] = False,
) -> None:
    if version:
        console.print(installed_version("st_reba"))
        raise typer.Exit
