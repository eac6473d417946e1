"""The ``st-reba`` command: its subcommands, and the format of errors and warnings."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from . import build, compare, encode, export, serve, train
from .options import option
from .printing import console, notes, printable

#: Messages of PyTorch, NumPy and the system about missing memory.
_NO_MEMORY = re.compile(r"out of memory|(allocate|enough) memory", re.IGNORECASE)


class Commands(TyperGroup):
    """Group of all subcommands. An error that a user can fix is printed as a sentence; others keep their traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # The report of a comparison shows the command.
        ctx.obj = shlex.join(["st-reba", *args])
        # Stdout is for the JSON object alone.
        console.stderr = "--json" in args
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **settings: Any) -> Any:
        with _escaped():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        if os.getpid() == 1:
            # The system ignores signals for which process 1, such as that of a container, has no handler.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        with warnings.catch_warnings(), _escaped():
            warnings.showwarning = _print_warning
            try:
                return super().invoke(ctx)
            except (ValueError, OSError, ImportError, MemoryError, RuntimeError) as error:
                no_memory = isinstance(error, MemoryError) or bool(_NO_MEMORY.search(str(error)))
                if ctx.params.get("traceback") or (isinstance(error, RuntimeError) and not no_memory):
                    raise
                message = str(error)
                if no_memory:
                    first = (message.strip() or type(error).__name__).splitlines()[0].rstrip(".")
                    message = f"There is not enough memory ({first}): use a smaller model, or a machine with more."
                notes.say(Text.assemble(("Error:", "red"), f" {message}"))
                raise typer.Exit(1) from None


@contextmanager
def _escaped() -> Iterator[None]:
    """Escape control characters in usage errors, which may quote file names."""
    try:
        yield
    except Exception as error:
        # The classes of usage errors differ between versions of typer, but all have a message.
        if isinstance(message := getattr(error, "message", None), str):
            error.message = printable(message)  # type: ignore[attr-defined]
        raise


def _print_warning(message: Warning | str, category: type[Warning], *location: Any, **more: Any) -> None:
    """Print a warning without its location in the code; skip deprecation warnings."""
    if not issubclass(category, (DeprecationWarning, PendingDeprecationWarning)):
        notes.say(Text.assemble(("Note:", "yellow"), f" {message}"))


app = typer.Typer(
    name="st-reba",
    cls=Commands,
    help="Text embeddings from decoder-only language models, without training.",
    no_args_is_help=True,
    # rich's tables cut the names of options in a narrow terminal.
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)
for command in (
    build.build, compare.compare, encode.encode, export.export, export.push,
    build.recipes, serve.serve, train.train, serve.verify,
):  # fmt: skip
    app.command()(command)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, option("Show the version and exit.", "--version")] = False,
    traceback: Annotated[bool, option("Show the traceback of an error.", "--traceback")] = False,
) -> None:
    if version:
        console.print(installed_version("st_reba"))
        raise typer.Exit
