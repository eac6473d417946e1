"""The folder beside the output in which a run keeps what it has done, until all of it takes the output's place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from ..files import atomic_file, flush_directory, remove_scratch
from .outputs import part_number

Settings = dict[str, str | int | bool | None]

_BLOCK = 1 << 22


@dataclass(frozen=True)
class Stamp:
    """A file as it was read. Plain data, for worker processes; the same on every machine that shares the file."""

    path: Path
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)

    def check(self) -> None:
        """See that the file has not been written since.

        Raises:
            ValueError: If it was.
        """
        if not self.path.is_file() or Stamp.of(self.path) != self:
            raise ValueError(
                f"{self.path} was changed during the run. What is done is kept: if the file is again what it was, the "
                "same command goes on; else begin anew with --overwrite."
            )


def file_digests(
    paths: Iterable[Path], memory: Path, on_bytes: Callable[[int, int], None] = lambda done, total: None
) -> dict[Path, str]:
    """SHA-256 of whole files, as hexadecimal digits.

    Args:
        paths: The files.
        memory: A file that remembers digests. What it remembers, and was not written since, is not read again; a file
            is known by device, inode, size, and times of writing and of change.
        on_bytes: Called with how many bytes are read, and of how many.

    Raises:
        ValueError: If a file is written while it is read.
    """
    known: dict[str, str] = json.loads(memory.read_text("utf-8")) if memory.is_file() else {}
    keys = {path: _key(path.stat()) for path in paths}
    missing = {path: path.stat().st_size for path, key in keys.items() if key not in known}
    total, done = sum(missing.values()), 0
    block = memoryview(bytearray(_BLOCK))
    for path in missing:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as stream:
            end = done + os.fstat(stream.fileno()).st_size
            # A file that grows as fast as it is read would have no end.
            while done < end and (size := stream.readinto(block)):
                digest.update(block[:size])
                done += size
                on_bytes(done, total)
            if _key(os.fstat(stream.fileno())) != keys[path]:
                raise ValueError(f"{path} is being written: begin when it is complete.")
        known[keys[path]] = digest.hexdigest()
    if missing:
        with atomic_file(memory) as stream:
            stream.write(json.dumps(known, indent=1).encode())
    return {path: known[key] for path, key in keys.items()}


def _key(status: os.stat_result) -> str:
    return "-".join(map(str, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)))


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


def state(path: Path) -> object:
    """Tells what lies at a path from anything else that may come to lie there; None if nothing does."""
    if not os.path.lexists(path):
        return None
    if not path.is_dir():
        return _signature(path)
    return _signature(path), sorted((entry.name, _signature(entry)) for entry in path.iterdir())


def take_place(finished: Path, out: Path, *, replaces: object, aside: Path) -> Path:
    """Move what is finished to its place, or beside it where something lies there that may not be replaced.

    Args:
        finished: A file, or a directory.
        out: The place.
        replaces: The :func:`state` that may be replaced; None: nothing.
        aside: Where a directory that is replaced lies for a moment, on the same disk; removed with what it lies in,
            where this process is killed in that moment.

    Returns:
        Where it lies: ``out``, or ``out-1``, ``out-2``, ...
    """
    if replaces is not None and state(out) == replaces:
        _replace(finished, out, aside)
        return out
    names = (out.with_name(f"{out.stem}-{number}{out.suffix}") if number else out for number in count())
    for place in names:
        try:
            _move_new(finished, place)
        except OSError:
            if not os.path.lexists(place):
                raise
        else:
            break
    return place


def _signature(path: Path) -> tuple[int, ...]:
    status = path.lstat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


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
