"""Atomic writing of files and directories."""

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

# Error numbers for a full disk and an exceeded quota.
_FULL = {errno.ENOSPC, errno.EDQUOT}
#: Messages of safetensors, in the system's words.
_FULL_WORDS = re.compile(r"No space left on device|Disk quota exceeded")
#: Messages of NumPy and PyTorch for an incomplete write, which hide the system's error.
_CUT_SHORT = re.compile(
    r"\d+ requested and \d+ written$|basic_ios::clear: iostream error$"
    r"|\[enforce fail at inline_container\.cc:\d+\] \. (PytorchStreamWriter failed|unexpected pos \d+ vs \d+)"
)


def is_full(error: BaseException) -> bool:
    """Return whether an error means a full disk or an exceeded quota."""
    text = str(error)
    if getattr(error, "errno", None) in _FULL or _FULL_WORDS.search(text):
        return True
    # PyTorch raises its own error while it handles that of the system.
    system = getattr(error.__context__, "errno", None)
    return bool(_CUT_SHORT.match(text)) and (system is None or system in _FULL)


@contextmanager
def _full_disk_errors(path: Path) -> Iterator[None]:
    """Raise the errors of libraries for a full disk as the system's own, with the path."""
    try:
        yield
    except Exception as error:
        if not is_full(error) or getattr(error, "filename", None) is not None:
            raise
        code = getattr(error, "errno", None) or errno.ENOSPC
        message = f"{os.strerror(code)}, and nothing is left half-written. Make room, or set another place"
        raise OSError(code, message, str(path)) from error


def check_free(out: Path, option: str) -> None:
    """Check that a path is free, or an empty directory.

    Args:
        out: Path of a directory to write.
        option: Name of the option that sets it, such as ``"--out"``.

    Raises:
        ValueError: If the path is a file or a directory with files.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory: choose another {option}, or remove it.")


def acquired(path: Path, message: str) -> FileLock:
    """Return the lock of a file, acquired.

    Raises:
        ValueError: With this message, if another process has it.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(message) from None
    return lock


@contextmanager
def held(out: Path, option: str) -> Iterator[None]:
    """Lock a path by a hidden file next to it.

    Args:
        out: Path of a file or a directory, whose parents are created.
        option: Name of the option that sets it.

    Raises:
        ValueError: If another process has locked the path.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    message = f"{out} is in use: another process is writing it. Wait, or choose another {option}."
    lock = acquired(out.with_name(f".{out.name}.lock"), message)
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextmanager
def atomic_directory(out: Path, option: str = "--out") -> Iterator[Path]:
    """Yield a directory that is moved to ``out`` at the end of the block, or removed on an error.

    Args:
        out: Path of the directory, whose parents are created.
        option: Name of the option that sets it.

    Raises:
        ValueError: If the path is not free, or another process has locked it.
        OSError: If the disk is full.
    """
    check_free(out, option)
    with (
        _full_disk_errors(out),
        held(out, option),
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
    """Yield a stream whose content replaces ``path`` at the end of the block, and is removed on an error.

    Args:
        path: Path of the file.
        mode: ``"wb"`` for bytes, or ``"w"`` for text in UTF-8 with unchanged line ends.

    Raises:
        OSError: If the disk is full.
    """
    # A unique name, as another worker may be writing the same file with the same bytes.
    scratch = path.with_name(f"{_SCRATCH}{uuid.uuid4().hex}")
    try:
        with _full_disk_errors(path):
            with scratch.open("wb") if mode == "wb" else scratch.open("w", encoding="utf-8", newline="") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(scratch, path)
            flush_directory(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def remove_scratch(directory: Path) -> None:
    """Remove the incomplete files of killed processes."""
    for path in directory.glob(f"{_SCRATCH}*"):
        path.unlink(missing_ok=True)


def flush_directory(path: Path) -> None:
    """Flush a directory's entries to the disk."""
    if os.name != "nt":  # Windows has no handle on a directory to flush.
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
