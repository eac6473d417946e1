"""Destinations of an output: a path of this machine, or a URL that fsspec writes to."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import cached_assets_path

from ..data.sources import asking, is_remote
from ..files import flush_directory
from ..optional import require

#: A file, or the files of a folder: name (empty for a file), size, and a value that changes when it is written.
Looks = list[list[str | int]]
#: Called with how many bytes are uploaded, and of how many.
OnBytes = Callable[[int, int], None]

#: The last file of a folder on an object store: the folder is whole if it is there.
SUCCESS = "_SUCCESS"
#: Protocols of object stores: a file is there whole when its upload ends, and not before. A move would be a copy.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hf"}
#: Files that are uploaded between two calls of ``on_bytes``; fsspec sends several at a time where it can.
_TOGETHER = 64


class Local:
    """A file, or a directory, on this machine.

    Attributes:
        path: Its path.
        work: Path that names the run's folder.
        suffix: Of its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = self.work = path.absolute()
        self.suffix = path.suffix

    def __str__(self) -> str:
        return str(self.path)

    def looks(self) -> Looks | None:
        """Return what tells the present content from a later one; None: nothing is there."""
        return looks(self.path)

    def take(self, finished: Path, before: Looks | None, replaced: Path, on_bytes: OnBytes) -> None:
        """Move what is finished, a file or a directory, to its place.

        Args:
            finished: File or directory to move.
            before: Result of :meth:`looks` when the run began.
            replaced: Path on the same disk for a directory that was there.
            on_bytes: Not called: a move takes no time.

        Raises:
            FileExistsError: If something else is there now: it is left as it is, and so is what is finished.
        """
        _check_same(self, before)
        if finished.is_dir() and before is not None:
            # No system replaces a directory that holds something in one step.
            os.replace(self.path, replaced)
        os.replace(finished, self.path)
        flush_directory(self.path.parent)


class Remote:
    """A file, or a folder, at a URL that fsspec writes to.

    Args:
        url: Such as ``"s3://bucket/vectors.npy"``; without a suffix, a folder.

    Attributes:
        path: Its path if the URL names a file of this machine; else None.
        work: Path that names the run's folder on this machine.
        suffix: Of its name.

    Raises:
        ImportError: If a package is missing that writes there.
        ValueError: If nothing can be written to such a URL.
    """

    def __init__(self, url: str) -> None:
        self._url = url if url.endswith("://") else url.rstrip("/")
        core = require("fsspec.core", "data", "A remote --out")
        with self._asking():
            self._filesystem, self._path = core.url_to_fs(self._url)
        protocols = self._filesystem.protocol
        protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        self._is_store = bool(protocols & _OBJECT_STORES)
        name = PurePosixPath(self._path).name
        is_bucket = self._is_store and "/" not in self._path.strip("/")
        if not name or is_bucket or protocols & {"http", "https"}:
            raise ValueError(
                f"--out {url}: nothing is written there. Give the URL of a file or a folder that can be written, such "
                "as s3://bucket/vectors.parquet."
            )
        if "hf" in protocols and not self._has_repository():
            raise ValueError(
                f"--out {url}: the Hub has no such repository, or does not show it to you. Make it first, or log in "
                "with `hf auth login`."
            )
        self.path = Path(self._path) if "file" in protocols else None
        self.suffix = PurePosixPath(name).suffix
        digest = hashlib.sha256(self._url.encode()).hexdigest()[:16]
        self.work = cached_assets_path("st_reba", "encode") / f"{digest}-{name}"

    def __str__(self) -> str:
        return self._url

    def looks(self) -> Looks | None:
        """Return what tells the present content from a later one; None: nothing is there."""
        utils = require("fsspec.utils", "data", "A remote --out")
        with self._asking():
            self._filesystem.invalidate_cache()
            try:
                found = self._filesystem.find(self._path, detail=True)
                # Of a file, some file systems find the name alone.
                infos = {name: info or self._filesystem.info(name) for name, info in sorted(found.items())}
            except FileNotFoundError:
                return None
        inside = re.compile(re.escape(self._path.strip("/")) + "/?")
        return [
            [inside.sub("", name.strip("/"), count=1), info["size"], utils.tokenize(info)]
            for name, info in infos.items()
        ] or None

    def take(self, finished: Path, before: Looks | None, replaced: Path, on_bytes: OnBytes) -> None:
        """Upload what is finished; it stays on this machine, too.

        An object store shows a file when all of it is there; of a folder, :data:`SUCCESS` comes last. Elsewhere it is
        uploaded next to its place, under a hidden name, and moved.

        Args:
            finished: A file or a directory.
            before: Result of :meth:`looks` when the run began.
            replaced: Not used: what is there is removed.
            on_bytes: Called as the upload goes on.

        Raises:
            FileExistsError: If something else is there now: it is left as it is.
            OSError: If it cannot be written; the upload may be tried again.
        """
        _check_same(self, before)
        is_folder = finished.is_dir()
        with self._asking():
            # An empty folder, too: what is moved to it would come to lie in it.
            if self._filesystem.isdir(self._path):
                self._filesystem.rm(self._path, recursive=True)
            if self._is_store:
                self._put(finished, self._path, on_bytes)
                if is_folder:
                    self._filesystem.pipe_file(f"{self._path}/{SUCCESS}", b"")
                return
            above, _, name = self._path.rpartition("/")
            scratch = f"{above}/.{name}.uploading"
            # A killed upload has left it.
            if self._filesystem.exists(scratch):
                self._filesystem.rm(scratch, recursive=True)
            self._filesystem.makedirs(scratch if is_folder else above, exist_ok=True)
            self._put(finished, scratch, on_bytes)
            self._filesystem.mv(scratch, self._path, recursive=is_folder)

    def _has_repository(self) -> bool:
        with self._asking():
            try:
                self._filesystem.resolve_path(self._path)
            except FileNotFoundError:
                return False
        return True

    def _put(self, source: Path, target: str, on_bytes: OnBytes) -> None:
        files = sorted(source.iterdir()) if source.is_dir() else [source]
        sizes = [path.stat().st_size for path in files]
        on_bytes(0, sum(sizes))
        for start in range(0, len(files), _TOGETHER):
            some = files[start : start + _TOGETHER]
            targets = [f"{target}/{path.name}" if source.is_dir() else target for path in some]
            self._filesystem.put([str(path) for path in some], targets)
            on_bytes(sum(sizes[: start + _TOGETHER]), sum(sizes))

    def _asking(self) -> AbstractContextManager[None]:
        return asking(self._url, to_write=True)


#: One of the two.
Place = Local | Remote


def place_of(out: str | Path) -> Place:
    """Return the place that a user names.

    Raises:
        ImportError: If a package is missing that writes there.
        ValueError: If nothing can be written to such a URL.
    """
    return Remote(str(out)) if is_remote(out) else Local(Path(out))


def looks(path: Path) -> Looks | None:
    """Return what tells a file, or a folder of files, from a later one; None: there is none.

    Names, sizes and times of writing: they are the same wherever it is moved on its disk, and on every machine that
    shares it.
    """
    if not path.exists():
        return None
    files = {entry.name: entry.stat() for entry in sorted(path.iterdir())} if path.is_dir() else {"": path.stat()}
    return [[name, status.st_size, status.st_mtime_ns] for name, status in files.items()]


def part_of(found: Looks | None, whole: Sequence[Sequence[Any]]) -> bool:
    """Whether there are files, and all have the names and sizes of files of the whole: an upload has begun."""
    sizes = {SUCCESS: 0, **{name: size for name, size, _ in whole}}
    return found is not None and all(sizes.get(name) == size for name, size, _ in found)


def _check_same(place: Place, before: Looks | None) -> None:
    if place.looks() != before:
        raise FileExistsError(
            f"{place} appeared, or was written, while this ran: it is left as it is, and all that is done is kept. "
            "Move it elsewhere, and the same command ends the run."
        )
