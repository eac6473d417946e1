"""The ``st-reba`` command: one file a subcommand; here, all of them, and the form of errors and warnings."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from . import build, compare, encode, export, push, recipes, serve, train, verify
from .options import option
from .printing import console, notes, printable

#: What PyTorch, NumPy and the system say where memory is not there.
_NO_MEMORY = re.compile(r"out of memory|(allocate|enough) memory", re.IGNORECASE)


class Commands(TyperGroup):
    """All subcommands. An error that a user can put right is a sentence; any other keeps its trace."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # The page of a comparison shows it.
        ctx.obj = shlex.join(["st-reba", *args])
        # Then stdout is the object's alone.
        console.stderr = "--json" in args
        # A shell does it where the path is a word of its own.
        own = re.compile(r"(--(?!\S*(?:prompt|template)=)[\w-]+=)~(?=/|$)")
        return super().parse_args(
            ctx, [own.sub(lambda found: found[1] + os.path.expanduser("~"), word) for word in args]
        )

    def make_context(self, *args: Any, **settings: Any) -> Any:
        with _escaped():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        if os.getpid() == 1:
            # The system ignores a signal for which process 1, as of a container, has no handler.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        with warnings.catch_warnings(), _escaped():
            warnings.showwarning = _noted
            try:
                return super().invoke(ctx)
            except (ValueError, OSError, ImportError, MemoryError, RuntimeError) as error:
                no_memory = _lacks_memory(error)
                if ctx.params.get("traceback") or (isinstance(error, RuntimeError) and not no_memory):
                    raise
                # A command that has written something has imported st_reba; a refusal need not wait for it.
                files = sys.modules.get("st_reba.files")
                full = f"The disk is full ({error}): make room, also for temporary files (TMPDIR)."
                said = full if files is not None and files.is_full(error) else error
                if no_memory:
                    first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
                    said = f"There is not enough memory ({first}): take a smaller model, or a machine with more."
                notes.say(Text.assemble(("Error:", "red"), f" {said}"))
                raise typer.Exit(1) from None


def _lacks_memory(error: Exception) -> bool:
    """Return whether memory is not there: in the system's words, or in those of PyTorch for a processor or a device."""
    by_name = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return by_name or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


@contextmanager
def _escaped() -> Iterator[None]:
    """Escape control characters of what was mistyped, as names of files may hold any; suggest only what is near."""
    try:
        yield
    except Exception as error:
        # Errors of usage are of other classes in other versions of typer, and each has a message.
        if isinstance(message := getattr(error, "message", None), str):
            error.message = printable(message)  # type: ignore[attr-defined]
        if near := getattr(error, "possibilities", None):
            error.possibilities = get_close_matches(error.option_name, near, cutoff=0.75)  # type: ignore[attr-defined]
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
    app.command()(command)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, option("Show the version and exit.", "--version")] = False,
    traceback: Annotated[bool, option("Show where in the code an error was raised.", "--traceback")] = False,
) -> None:
    if version:
        console.print(installed_version("st_reba"))
        raise typer.Exit
