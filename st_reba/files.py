"""Files and directories that are what they should be, and are written wholly or not at all."""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What the system says where there is no room: on the disk, or in the user's share of it.
_FULL = {errno.ENOSPC, errno.EDQUOT}
#: What libraries say that do not hand on the system's error: safetensors in the system's words, NumPy, PyTorch.
_FULL_WORDS = re.compile(
    r"No space left on device|Disk quota exceeded|\d+ requested and \d+ written"
    r"|PytorchStreamWriter failed|iostream error|unexpected pos \d+ vs \d+"
)


class NoRoomError(OSError):
    """A disk is full, or a quota is used up: told in a sentence."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no room left to write, which nobody has told in a sentence yet."""
    told = isinstance(error, NoRoomError)
    return not told and (getattr(error, "errno", None) in _FULL or bool(_FULL_WORDS.search(str(error))))


def check_file(path: Path) -> None:
    """Refuse what is no file to read.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is a directory.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a directory: give a file.")
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file.")


@contextmanager
def room_in(directory: Path) -> Iterator[None]:
    """Say of a full disk that it is full, whatever the library that was writing calls it.

    Args:
        directory: Where is written.

    Raises:
        NoRoomError: Instead of what was raised because of a full disk or a used-up quota, which is its cause.
    """
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        where = getattr(error, "filename", None) or directory
        raise NoRoomError(
            f"{where}: there is no room left on the disk ({error}). Nothing is left half-written: make room, and run "
            "the same again."
        ) from error


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
        NoRoomError: If the disk is full.
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
    except Exception as error:
        if not is_full(error):
            raise
        raise NoRoomError(
            f"{out} could not be written: there is no room left on the disk ({error}), and nothing is left of it. Make "
            f"room in {out.parent}, or choose another {called}."
        ) from error
