"""Files that are there whole or not at all, whatever kills the process or the machine."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from ..files import room_in

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
def durable(path: Path, move: Callable[[Path, Path], None] = replace) -> Iterator[BinaryIO]:
    """A stream whose bytes become ``path``, by ``move``, when all are on the disk; on an error nothing is left.

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
            move(scratch, path)
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
