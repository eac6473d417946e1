"""The place of an output: nothing is destroyed there but what its user has agreed to replace."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from ..files import flush_directory


class Target:
    """Where an output goes. What lies there when a run begins may be replaced if that was asked for; nothing else may.

    Args:
        path: The place.
        overwrite: Whether what lies there at the beginning may be replaced.
        aside: Where a directory that is replaced lies for a moment, on the same disk; removed with what it lies in,
            where this process is killed in that moment.

    Attributes:
        landed: Where the output lies after :meth:`take`: at ``path``, or beside it.
    """

    def __init__(self, path: Path, overwrite: bool, aside: Path) -> None:
        self.path = self.landed = path
        self._aside = aside
        self._before = _state(path)
        self._overwrite = overwrite

    @property
    def occupied(self) -> bool:
        """Whether something lay there at the beginning."""
        return self._before is not None

    def take(self, finished: Path) -> None:
        """Move what is finished to the place; beside it, if something lies there that did not before."""
        if self._overwrite and self.occupied and _state(self.path) == self._before:
            _replace(finished, self.path, self._aside)
            return
        for place in _names(self.path):
            try:
                _move_new(finished, place)
            except OSError:
                if not os.path.lexists(place):
                    raise
            else:
                self.landed = place
                return

    def check(self, holds: str) -> None:
        """See that the output is in its place.

        Raises:
            FileExistsError: If it had to be put beside it, saying where it is.
        """
        if self.landed != self.path:
            raise FileExistsError(
                f"{self.path} appeared, or was written, while this ran: it is left as it is, and the {holds} are in "
                f"{self.landed}."
            )


def _state(path: Path) -> object:
    """Tells what lies at a path from anything else that may come to lie there; None if nothing does."""
    if not os.path.lexists(path):
        return None
    if not path.is_dir():
        return _signature(path)
    return _signature(path), sorted((entry.name, _signature(entry)) for entry in path.iterdir())


def _signature(path: Path) -> tuple[int, ...]:
    status = path.lstat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _names(path: Path) -> Iterator[Path]:
    yield path
    for number in count(1):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def _move_new(source: Path, target: Path) -> None:
    """Move to where nothing lies: a file or a directory that does is left as it is, and is an error."""
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
    flush_directory(target.parent)


def _replace(finished: Path, target: Path, aside: Path) -> None:
    if not finished.is_dir():
        os.replace(finished, target)
        flush_directory(target.parent)
        return
    # No system replaces a directory that holds something in one step.
    os.replace(target, aside)
    flush_directory(target.parent)
    os.replace(finished, target)
    flush_directory(target.parent)
    if aside.is_symlink():
        aside.unlink()
    else:
        shutil.rmtree(aside)
