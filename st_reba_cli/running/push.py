"""What ``st-reba push`` does; it needs the Hub's client alone."""

from __future__ import annotations

from pathlib import Path

from st_reba.hub.push import model_class, push

from ..printing import console


def run(
    *, directory: Path, repo_id: str, private: bool, revision: str | None, create_pr: bool, message: str | None
) -> None:
    """Upload a saved model, and tell where it is."""
    url = push(directory, repo_id, private=private, revision=revision, create_pr=create_pr, message=message)
    where = f", revision {revision}" if revision is not None and not create_pr else ""
    did = "Proposed" if create_pr else "Pushed"
    console.print(f"{did} {directory} to {repo_id}{where}: {url}", soft_wrap=True)
    if not create_pr:
        branch = f', revision="{revision}"' if revision is not None else ""
        line = f'import st_reba; {model_class(directory)}("{repo_id}"{branch})'
        console.print(f"Load it with: {line}", soft_wrap=True)
