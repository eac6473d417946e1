"""The ``st-reba`` command: one file a subcommand."""

from __future__ import annotations

from typing import Annotated

import typer

from st_reba.version import __version__

from . import build, compare, distil, encode, export, layers, push, search, serve, train, verify
from .common import app, console

__all__ = [
    "app",
    "build",
    "compare",
    "distil",
    "encode",
    "export",
    "layers",
    "push",
    "search",
    "serve",
    "train",
    "verify",
]


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit
