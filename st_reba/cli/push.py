"""``st-reba push``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..hub.push import push
from .common import app, clear_errors, console


@app.command("push")
def push_command(
    directory: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A saved SentenceTransformer.")],
    repo_id: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="Where it goes on the Hub; made if there is none.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Refuse a public repository; make a private one.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to. Default: the main one.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of pushing.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
) -> None:
    """Upload a saved model, after a check that it is complete. The token is the one you logged in with, or HF_TOKEN."""
    with clear_errors():
        url = push(directory, repo_id, private=private, revision=revision, create_pr=create_pr, message=message)
    where = f", revision {revision}" if revision is not None and not create_pr else ""
    did = "Proposed" if create_pr else "Pushed"
    console.print(f"{did} {directory} to {repo_id}{where}: {url}", soft_wrap=True)
    if not create_pr:
        branch = f', revision="{revision}"' if revision is not None else ""
        line = f'import st_reba; SentenceTransformer("{repo_id}"{branch})'
        console.print(f"Load it with: {line}", soft_wrap=True)
