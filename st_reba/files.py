"""Files and directories that are what they should be, and are written wholly or not at all."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

# What the system says where there is no room: on the disk, or in the user's share of it.
_FULL = {errno.ENOSPC, errno.EDQUOT}
#: What safetensors says, in the system's words.
_FULL_WORDS = re.compile(r"No space left on device|Disk quota exceeded")
#: What NumPy and PyTorch say of a file that took less than was written, where the system's error is not handed on.
_CUT_SHORT = re.compile(
    r"\d+ requested and \d+ written$|basic_ios::clear: iostream error$"
    r"|\[enforce fail at inline_container\.cc:\d+\] \. (PytorchStreamWriter failed|unexpected pos \d+ vs \d+)"
)


class NoRoomError(OSError):
    """A disk is full, or a quota is used up: told in a sentence."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no room left to write, which nobody has told in a sentence yet."""
    if isinstance(error, NoRoomError):
        return False
    text = str(error)
    if getattr(error, "errno", None) in _FULL or _FULL_WORDS.search(text):
        return True
    # PyTorch raises an error of its own while it handles the system's.
    system = getattr(error.__context__, "errno", None)
    return bool(_CUT_SHORT.match(text)) and (system is None or system in _FULL)


def check_file(path: Path | None, called: str = "") -> None:
    """Refuse what is no file to read.

    Args:
        path: None: nobody asks for one.
        called: What the user calls it, such as an option.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is a directory.
    """
    if path is None:
        return
    name = f"{called} {path}".lstrip()
    if path.is_dir():
        raise ValueError(f"{name} is a directory: give a file.")
    if not path.exists():
        raise FileNotFoundError(f"{name}: there is no such file. Check the name.")


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


_SCRATCH = ".writing-"


def replace(source: Path, target: Path) -> None:
    """Move in one step, and see to it that the step itself is on the disk."""
    os.replace(source, target)
    _flush(target.parent)


def move_new(source: Path, target: Path) -> None:
    """The same, where nothing lies: a file or a directory that does is left as it is.

    Raises:
        FileExistsError: If something lies there.
    """
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists.")
    if source.is_dir():
        # A directory replaces no file, and no directory that holds something.
        os.rename(source, target)
    else:
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:  # A file system without links.
            os.rename(source, target)
        else:
            source.unlink()
    _flush(target.parent)


@contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """A stream whose bytes become ``path`` when all are on the disk; on an error what was there before is.

    Raises:
        NoRoomError: If the disk is full.
    """
    # Of its own name: another worker may be writing the same file, with the same bytes.
    scratch = path.with_name(f"{_SCRATCH}{uuid.uuid4().hex}")
    try:
        with room_in(path.parent):
            with scratch.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def durable_text(path: Path) -> Iterator[TextIO]:
    """The same for text: UTF-8, its line ends as they are written."""
    with durable(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
        yield text
        text.detach()


def remove_scratch(directory: Path) -> None:
    """Remove what a killed process was writing."""
    for path in directory.glob(f"{_SCRATCH}*"):
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    if os.name != "nt":  # Windows has no handle on a directory to flush.
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
