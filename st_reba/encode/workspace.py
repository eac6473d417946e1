"""The folder beside the output in which a run keeps what it has done, until all of it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from ..files import atomic_file, remove_scratch
from .outputs import part_number

Settings = dict[str, str | int | bool | None]


@dataclass(frozen=True)
class Finished:
    """What a run gave.

    Attributes:
        rows: Vectors of the output.
        texts: Those of the input.
    """

    rows: int
    texts: int


@dataclass(frozen=True)
class Workspace:
    """``OUT.partial``: what was asked for, and the parts that are done. Plain data, for worker processes."""

    path: Path

    @classmethod
    def beside(cls, out: Path) -> Workspace:
        return cls(out.with_name(f"{out.name}.partial"))

    @property
    def parts(self) -> Path:
        return self.path / "parts"

    @property
    def texts(self) -> Path:
        """The input as a Parquet file, whose row groups are the chunks."""
        return self.path / "texts.parquet"

    @property
    def digests(self) -> Path:
        # Hidden: it is there before the manifest, which makes the folder a run's.
        return self.path / ".digests.json"

    @property
    def input(self) -> Path:
        """Copies of what is not on this machine; hidden, as the digests are."""
        return self.path / ".input"

    @property
    def ranges(self) -> Path:
        return self.path / "ranges.npy"

    @property
    def whole(self) -> Path:
        """The output, all of it, before it comes to its place."""
        return self.path / "whole"

    @property
    def whole_ranges(self) -> Path:
        return self.path / "whole-ranges"

    @property
    def aside(self) -> Path:
        """What the output replaces, for a moment."""
        return self.path / "replaced"

    @property
    def _manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def _finished(self) -> Path:
        # Hidden: it goes last, behind the manifest.
        return self.path / ".finished.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the folder alone. A run that fails before its first part leaves none.

        Raises:
            ValueError: If another process is at it, or if the folder is something else.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._is_ours():
            raise ValueError(f"{self.path} is not an interrupted run's: remove it, or choose another --out.")
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"{self.path} is in use: another process is writing this output.") from None
        try:
            yield
        finally:
            # Also what is no part: it is somebody's.
            empty = not (self.parts.is_dir() and any(self.parts.iterdir()))
            lock.release()
            if empty:
                self.remove()

    def begin(self, settings: Settings, overwrite: bool) -> None:
        """Begin a run, or go on with an interrupted one of the same settings.

        Raises:
            ValueError: If other settings were used (``overwrite`` begins anew), or a file among the parts is none.
        """
        remove_scratch(self.path)
        before = json.loads(self._manifest.read_text("utf-8")) if self._manifest.is_file() else None
        if before not in (None, settings) and not overwrite:
            raise ValueError(self._difference(before, settings))
        self._finished.unlink(missing_ok=True)
        shutil.rmtree(self.aside, ignore_errors=True)
        if before != settings:
            # The manifest last: a folder without one would be taken for somebody else's.
            shutil.rmtree(self.parts, ignore_errors=True)
            for path in (self.texts, self.ranges, self.whole, self.whole_ranges):
                path.unlink(missing_ok=True)
            with atomic_file(self._manifest) as stream:
                stream.write(json.dumps(settings, indent=1).encode())
        self.parts.mkdir(exist_ok=True)
        remove_scratch(self.parts)
        # Tells of a file that is no part, now rather than at the end.
        self.done()

    def done(self) -> set[int]:
        """The chunks that need not be encoded again.

        Raises:
            ValueError: If a file among the parts is none.
        """
        if not self.parts.is_dir():
            return set()
        return {part_number(path) for path in self.parts.iterdir() if not path.name.startswith(".")}

    @property
    def may_be_finished(self) -> bool:
        """Whether a run was about to move its output to its place; only :meth:`finished` tells whether it did."""
        return self._finished.is_file()

    def finish(self, settings: Settings, whole: Path, made: Finished) -> None:
        """Note what ``whole`` is, which comes to its place next: should that be the last step, it is known there."""
        noted = {"settings": settings, "is": _looks(whole), "made": asdict(made)}
        with atomic_file(self._finished) as stream:
            stream.write(json.dumps(noted).encode())

    def finished(self, settings: Settings, out: Path) -> Finished | None:
        """What a run of these settings gave that was ended when its output had come to its place, which is ``out``."""
        if not (self.may_be_finished and out.exists()):
            return None
        noted = json.loads(self._finished.read_text("utf-8"))
        if noted["settings"] != settings or noted["is"] != _looks(out):
            return None
        return Finished(**noted["made"])

    def remove(self) -> None:
        """Remove the folder; what tells whose it is goes last, so that a removal that was ended can go on."""
        if not self.path.is_dir():
            return
        last = (self._manifest, self._finished)
        for path in sorted(self.path.iterdir(), key=lambda path: last.index(path) if path in last else -1):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()
        shutil.rmtree(self.path, ignore_errors=True)

    def _is_ours(self) -> bool:
        return self._manifest.is_file() or all(path.name.startswith(".") for path in self.path.iterdir())

    def _difference(self, before: Settings, now: Settings) -> str:
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        told = ", ".join(f"{name} {before.get(name)!r} (now {now.get(name)!r})" for name in names)
        return (
            f"{self.path} holds an interrupted run of other settings: {told}. Go on with those, choose another --out, "
            "or begin anew with --overwrite."
        )


def _looks(path: Path) -> list[list[str | int]]:
    """Tells an output from another one, wherever it is moved on its disk, and when that is mounted anew."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    names = [file.name if path.is_dir() else "" for file in files]
    states = [file.stat() for file in files]
    return [[name, state.st_size, state.st_mtime_ns] for name, state in zip(names, states, strict=True)]
