"""The ``st-reba`` command: one file a subcommand."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from . import build, compare, distil, encode, export, layers, push, search, serve, train, verify
from .common import app
from .printing import console

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
        console.print(installed_version("st_reba"))
        raise typer.Exit
