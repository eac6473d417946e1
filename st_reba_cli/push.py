"""``st-reba push``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from . import options
from .options import argument, option
from .printing import console, loading_line, write_json


def push(
    directory: Annotated[Path, argument("A saved SentenceTransformer.", "MODEL_DIR", exists=True, file_okay=False)],
    repo_id: Annotated[str, argument("Repository on the Hub, created if it does not exist.", "ORG/NAME")],
    private: Annotated[
        bool, option("Create the repository as private; an existing one must be private.", "--private")
    ] = False,
    revision: Annotated[str | None, option("Branch to push to. Default: main.")] = None,
    create_pr: Annotated[bool, option("Open a pull request instead of pushing.", "--create-pr")] = False,
    message: Annotated[str | None, option("Commit message.")] = None,
    as_json: options.Json = False,
) -> None:
    """Check that a saved model is complete, and upload it to the Hub.

    The token is that of your login, or HF_TOKEN.
    """
    if repo_id.count("/") != 1:
        raise ValueError(f'"{repo_id}" is not the name of a repository: give "org/name" or "user/name".')

    from st_reba.hub import push as hub

    url = hub.push(directory, repo_id, private=private, revision=revision, create_pr=create_pr, message=message)
    where = "" if revision is None else f", revision {revision}"
    line = loading_line(str(hub.loading_class(str(directory))), repo_id, revision)
    if create_pr:
        console.say(f"Proposed {directory} to {repo_id}: {url}")
    else:
        console.say(f"Pushed {directory} to {repo_id}{where}: {url}")
        console.say(f"Load it with: {line}")
    if as_json:
        write_json("push", url=str(url), repo_id=repo_id, revision=revision, pull_request=create_pr, load=line)
