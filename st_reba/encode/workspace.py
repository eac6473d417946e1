"""The folder beside the output in which a run keeps what it has done, until all of it takes the output's place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..files import atomic_file, remove_scratch
from .outputs import part_number
from .places import Looks, looks, part_of

Settings = dict[str, str | int | bool | None]

_BLOCK = 1 << 22


class Workspace:
    """``OUT.partial``: what was asked for, and the parts that are done. Plain data, for worker processes.

    Attributes:
        parts: The folder of the chunks' vectors.
        texts: The input as a Parquet file, whose row groups are the chunks.
        whole: The output, all of it, before it comes to its place.
        replaced: What the output replaces, for a moment.
        digests: What :func:`file_digests` remembers.
        input: Copies of what is not on this machine.
    """

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f"{out.name}.partial")
        self.parts = self.path / "parts"
        self.texts = self.path / "texts.parquet"
        self.whole = self.path / "whole"
        self.replaced = self.path / "replaced"
        # Hidden: they are there before the manifest, which makes the folder a run's.
        self.digests, self.input = self.path / ".digests.json", self.path / ".input"
        self._manifest = self.path / "manifest.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the folder alone. A run that fails before its first part leaves none.

        Raises:
            ValueError: If another process is at it, or if the folder is something else.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self._manifest.is_file() or all(path.name.startswith(".") for path in self.path.iterdir())):
            raise ValueError(f"{self.path} is not an interrupted run's: remove it, or choose another --out.")
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"{self.path} is in use: another process is writing this output.") from None
        try:
            yield
        finally:
            # A file that is no part counts, too: it is somebody's.
            is_empty = not (self.parts.is_dir() and any(self.parts.iterdir()))
            lock.release()
            if is_empty:
                self.remove()

    def begin(self, settings: Settings, overwrite: bool) -> None:
        """Begin a run, or go on with an interrupted one of the same settings.

        Raises:
            ValueError: If other settings were used (``overwrite`` begins anew), or a file among the parts is none.
        """
        remove_scratch(self.path)
        before = self._read()
        before.pop("finished", None)
        if before and before != settings and not overwrite:
            names = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
            told = ", ".join(f"{name} {before.get(name)!r} (now {settings.get(name)!r})" for name in names)
            raise ValueError(
                f"{self.path} holds an interrupted run of other settings: {told}. Go on with those, choose another "
                "--out, or begin anew with --overwrite."
            )
        _remove(self.replaced)
        if before != settings:
            for path in (self.parts, self.texts, self.whole):
                _remove(path)
            # After that: a folder without a manifest would be taken for somebody else's.
            self._write(settings)
        self.parts.mkdir(exist_ok=True)
        remove_scratch(self.parts)
        # Tells of a file that is no part, now rather than at the end.
        self.done()

    def done(self) -> set[int]:
        """The chunks that need not be encoded again.

        Raises:
            ValueError: If a file among the parts is none.
        """
        return {part_number(path) for path in self.parts.iterdir() if not path.name.startswith(".")}

    def finish(self, settings: Settings, found: Looks | None, rows: int, texts: int) -> None:
        """Note what the whole looks like, which comes to its place next: a run that is killed then is known by it
        there. A remote place is noted once more, as it looks when all is there."""
        self._write({**settings, "finished": {"looks": found, "rows": rows, "texts": texts}})

    def finished(self, settings: Settings, found: Looks | None) -> tuple[int, int] | None:
        """Vectors and texts of a run of these settings whose output is in its place, which looks so; else None."""
        noted = self._read()
        made = noted.pop("finished", None)
        if made is None or noted != settings or made["looks"] != found:
            return None
        return made["rows"], made["texts"]

    def uploading(self, settings: Settings, found: Looks | None) -> bool:
        """Whether what is found at a remote place is what a run of these settings has begun to upload."""
        noted = self._read()
        made = noted.pop("finished", None)
        return made is not None and noted == settings and found is not None and part_of(found, made["looks"])

    def remove(self) -> None:
        """Remove the folder; the manifest goes last, so that a removal that was ended can go on."""
        if self.path.is_dir():
            for path in self.path.iterdir():
                if path != self._manifest:
                    _remove(path)
            shutil.rmtree(self.path, ignore_errors=True)

    def _read(self) -> dict[str, Any]:
        noted: dict[str, Any] = json.loads(self._manifest.read_text("utf-8")) if self._manifest.is_file() else {}
        return noted

    def _write(self, noted: Mapping[str, Any]) -> None:
        with atomic_file(self._manifest) as stream:
            stream.write(json.dumps(noted, indent=1).encode())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_unchanged(before: Mapping[Path, object]) -> None:
    """See that files have not been written since :func:`looks` looked at them.

    Raises:
        ValueError: If one was.
    """
    for path, looked in before.items():
        if looks(path) != looked:
            raise ValueError(
                f"{path} was changed during the run. What is done is kept: if the file is again what it was, the same "
                "command goes on; else begin anew with --overwrite."
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
    for path, size in missing.items():
        digest = hashlib.sha256()
        end = done + size
        with path.open("rb") as stream:
            # A file that grows as fast as it is read would have no end.
            while done < end and (block := stream.read(_BLOCK)):
                digest.update(block)
                done += len(block)
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
