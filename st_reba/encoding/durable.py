"""Files that are there whole or not at all, whatever kills the process or the machine."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_SCRATCH = ".writing-"


@contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """A stream whose bytes become ``path`` when all are on the disk; on an error nothing is left."""
    # Of its own name: another worker may be writing the same file, with the same bytes.
    scratch = path.with_name(f"{_SCRATCH}{uuid.uuid4().hex}")
    try:
        with scratch.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def replace(source: Path, target: Path) -> None:
    """Move in one step, and see to it that the step itself is on the disk."""
    os.replace(source, target)
    if os.name != "nt":  # Windows has no handle on a directory to flush.
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def remove_scratch(directory: Path) -> None:
    """Remove what a killed process was writing."""
    for path in directory.glob(f"{_SCRATCH}*"):
        path.unlink(missing_ok=True)
