"""Files and directories that are what they should be, and are written wholly or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from filelock import FileLock, Timeout

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
    """Whether an error says that there is no room left to write, and is not yet a :class:`NoRoomError`."""
    if isinstance(error, NoRoomError):
        return False
    text = str(error)
    if getattr(error, "errno", None) in _FULL or _FULL_WORDS.search(text):
        return True
    # PyTorch raises an error of its own while it handles the system's.
    system = getattr(error.__context__, "errno", None)
    return bool(_CUT_SHORT.match(text)) and (system is None or system in _FULL)


@contextmanager
def _room(path: Path, advice: str) -> Iterator[None]:
    """Say of a full disk that it is full, whatever the library that was writing calls it."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        raise NoRoomError(
            f"{path} could not be written: there is no room left on the disk ({error}), and nothing is left "
            f"half-written. {advice}."
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
def held(out: Path, called: str) -> Iterator[None]:
    """Have a place alone, by a hidden lock beside it.

    Args:
        out: A file or a directory; directories above it are made.
        called: As in :func:`check_free`.

    Raises:
        ValueError: If another process has it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out.with_name(f".{out.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{out} is in use: another process is writing it. Wait, or choose another {called}.") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextmanager
def atomic_directory(out: Path, called: str = "--out") -> Iterator[Path]:
    """A directory to write in, which is moved to ``out`` when all is written, and removed on an error.

    Args:
        out: Where it shall lie; directories above it are made.
        called: As in :func:`check_free`.

    Raises:
        ValueError: If something lies there already, or another process is writing there.
        NoRoomError: If the disk is full.
    """
    check_free(out, called)
    with (
        _room(out, f"Make room in {out.parent}, or choose another {called}"),
        held(out, called),
        tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch,
    ):
        whole = Path(scratch) / "whole"
        whole.mkdir()
        yield whole
        if out.exists():
            out.rmdir()
        shutil.move(whole, out)


_SCRATCH = ".writing-"


@contextmanager
def atomic_file(path: Path, mode: Literal["wb", "w"] = "wb") -> Iterator[IO[Any]]:
    """A stream whose content becomes ``path`` when all of it is on the disk; on an error ``path`` stays as it was.

    Args:
        path: The file.
        mode: ``"wb"``: bytes. ``"w"``: text, in UTF-8, with the line ends that it is given.

    Raises:
        NoRoomError: If the disk is full.
    """
    # A name of its own: another worker may be writing the same file, with the same bytes.
    scratch = path.with_name(f"{_SCRATCH}{uuid.uuid4().hex}")
    try:
        with _room(path, "Make room, and run the same again"):
            with scratch.open("wb") if mode == "wb" else scratch.open("w", encoding="utf-8", newline="") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(scratch, path)
            flush_directory(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def remove_scratch(directory: Path) -> None:
    """Remove what a killed process was writing."""
    for path in directory.glob(f"{_SCRATCH}*"):
        path.unlink(missing_ok=True)


def flush_directory(path: Path) -> None:
    """See to it that what was moved into a directory, or out of it, is on the disk."""
    if os.name != "nt":  # Windows has no handle on a directory to flush.
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
