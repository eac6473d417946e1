"""``st-reba push``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .printing import console


def push(
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
    if repo_id.count("/") != 1:
        raise ValueError(f'"{repo_id}": a repository is "org/name" or "user/name".')
    if not directory.is_dir():
        raise ValueError(
            f"{directory}: there is no such directory. Give one that `st-reba build` or `save` has written."
        )

    from st_reba.hub import push as hub

    url = hub.push(directory, repo_id, private=private, revision=revision, create_pr=create_pr, message=message)
    if create_pr:
        console.say(f"Proposed {directory} to {repo_id}: {url}")
        return
    where, branch = ("", "") if revision is None else (f", revision {revision}", f', revision="{revision}"')
    console.say(f"Pushed {directory} to {repo_id}{where}: {url}")
    line = f'import st_reba; {hub.model_class(directory)}("{repo_id}"{branch})'
    console.say(f"Load it with: {line}")
