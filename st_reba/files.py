"""Writing all of a directory, or nothing."""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

# What the system says where there is no room: on the disk, or in the user's share of it.
_FULL = {errno.ENOSPC, errno.EDQUOT}


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no room left to write; safetensors says it in words of its own."""
    if isinstance(error, SafetensorError):
        return any(int(number) in _FULL for number in re.findall(r"os error (\d+)", str(error)))
    return isinstance(error, OSError) and error.errno in _FULL


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
        OSError: If the disk is full, naming ``out``; any other error of the system as it is.
    """
    check_free(out, called)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            whole = Path(scratch) / "whole"
            whole.mkdir()
            yield whole
            if out.exists():
                out.rmdir()
            shutil.move(whole, out)
    except (OSError, SafetensorError) as error:
        if not is_full(error):
            raise
        raise OSError(
            f"{out} could not be written: the disk is full, and nothing is left of it. Make room in {out.parent}, or "
            f"choose another {called}."
        ) from error
