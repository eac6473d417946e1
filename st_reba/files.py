"""Writing all of a directory, or nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_free(out: Path, called: str) -> None:
    """Refuse a directory that already holds something.

    Args:
        out: Where a directory shall be written.
        called: What the user knows it as, such as ``"--out"``.

    Raises:
        ValueError: If something lies there already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory: choose another {called}, or remove it.")


@contextmanager
def whole_directory(out: Path, called: str = "--out") -> Iterator[Path]:
    """A directory to write in, which takes its place ``out`` when all is written, or vanishes.

    Args:
        out: Where it shall lie; directories above it are made.
        called: As in :func:`check_free`.

    Raises:
        ValueError: If something lies there already.
    """
    check_free(out, called)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        yield whole
        if out.exists():
            out.rmdir()
        shutil.move(whole, out)
