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

from ..data.sources import file_system_errors, is_remote
from ..files import flush_directory
from ..optional import require

#: Files of an output: name (empty for a single file), size, and a value that changes when the file is written.
Stat = list[list[str | int]]
#: Called with the number of uploaded bytes and of all bytes.
OnBytes = Callable[[int, int], None]

#: Last file written to a folder on an object store: it marks the folder as complete.
SUCCESS = "_SUCCESS"
#: Protocols of object stores, where a file appears only when its upload is complete, and a move is a copy.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hf"}
#: Files uploaded between two calls of ``on_bytes``, some of them in parallel.
_FILES_PER_CALL = 64


class Local:
    """File or directory on this machine.

    Attributes:
        path: Absolute path.
        work: Path that names the run's folder.
        suffix: Suffix of the name.
    """

    def __init__(self, path: Path) -> None:
        self.path = self.work = path.absolute()
        self.suffix = path.suffix

    def __str__(self) -> str:
        return str(self.path)

    def stat(self) -> Stat | None:
        """Return the files at the destination, or None if there are none."""
        return stat(self.path)

    def commit(self, finished: Path, before: Stat | None, replaced: Path, on_bytes: OnBytes) -> None:
        """Move the finished output to its destination.

        Args:
            finished: File or directory to move.
            before: Result of :meth:`stat` when the run began.
            replaced: Path on the same disk for the directory that is replaced.
            on_bytes: Not called, as a move takes no time.

        Raises:
            FileExistsError: If the destination has changed. Nothing is moved then.
        """
        _check_same(self, before)
        if finished.is_dir() and before is not None:
            # No system replaces a directory that is not empty in one step.
            os.replace(self.path, replaced)
        os.replace(finished, self.path)
        flush_directory(self.path.parent)


class Remote:
    """File or folder at a URL that fsspec writes to.

    Args:
        url: URL such as ``"s3://bucket/vectors.npy"``. Without a suffix, it names a folder.

    Attributes:
        path: Path of a ``file://`` URL, else None.
        work: Path that names the run's folder on this machine.
        suffix: Suffix of the name.

    Raises:
        ImportError: If a package is missing that writes to the URL.
        ValueError: If the URL cannot be written.
    """

    def __init__(self, url: str) -> None:
        self._url = url if url.endswith("://") else url.rstrip("/")
        core = require("fsspec.core", "data", "A remote --out")
        with self._errors():
            self._filesystem, self._path = core.url_to_fs(self._url)
        protocols = self._filesystem.protocol
        protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        self._is_store = bool(protocols & _OBJECT_STORES)
        name = PurePosixPath(self._path).name
        is_bucket = self._is_store and "/" not in self._path.strip("/")
        if not name or is_bucket or protocols & {"http", "https"}:
            raise ValueError(
                f"--out {url} cannot be written. Give the URL of a file or a folder, such as "
                "s3://bucket/vectors.parquet."
            )
        if "hf" in protocols and not self._has_repository():
            raise ValueError(
                f"--out {url}: the Hub has no such repository, or you may not see it. Create it first, or log in with "
                "`hf auth login`."
            )
        self.path = Path(self._path) if "file" in protocols else None
        self.suffix = PurePosixPath(name).suffix
        digest = hashlib.sha256(self._url.encode()).hexdigest()[:16]
        self.work = cached_assets_path("st_reba", "encode") / f"{digest}-{name}"

    def __str__(self) -> str:
        return self._url

    def stat(self) -> Stat | None:
        """Return the files at the destination, or None if there are none."""
        utils = require("fsspec.utils", "data", "A remote --out")
        with self._errors():
            self._filesystem.invalidate_cache()
            try:
                files = self._filesystem.find(self._path, detail=True)
                # Some file systems return only the name of a single file.
                infos = {name: info or self._filesystem.info(name) for name, info in sorted(files.items())}
            except FileNotFoundError:
                return None
        inside = re.compile(re.escape(self._path.strip("/")) + "/?")
        return [
            [inside.sub("", name.strip("/"), count=1), info["size"], utils.tokenize(info)]
            for name, info in infos.items()
        ] or None

    def commit(self, finished: Path, before: Stat | None, replaced: Path, on_bytes: OnBytes) -> None:
        """Upload the finished output, and keep the local copy.

        On an object store, files appear when they are complete, and :data:`SUCCESS` is written last to a folder. On
        other file systems, the output is uploaded under a hidden name next to its destination, and then moved.

        Args:
            finished: File or directory to upload.
            before: Result of :meth:`stat` when the run began.
            replaced: Not used: the previous output is removed.
            on_bytes: Called during the upload.

        Raises:
            FileExistsError: If the destination has changed. Nothing is uploaded then.
            OSError: If the upload fails. It may be repeated.
        """
        _check_same(self, before)
        is_folder = finished.is_dir()
        with self._errors():
            # Also if it is empty: a move to an existing folder goes into it.
            if self._filesystem.isdir(self._path):
                self._filesystem.rm(self._path, recursive=True)
            if self._is_store:
                self._put(finished, self._path, on_bytes)
                if is_folder:
                    self._filesystem.pipe_file(f"{self._path}/{SUCCESS}", b"")
                return
            parent, _, name = self._path.rpartition("/")
            scratch = f"{parent}/.{name}.uploading"
            # A killed upload may have left it.
            if self._filesystem.exists(scratch):
                self._filesystem.rm(scratch, recursive=True)
            self._filesystem.makedirs(scratch if is_folder else parent, exist_ok=True)
            self._put(finished, scratch, on_bytes)
            self._filesystem.mv(scratch, self._path, recursive=is_folder)

    def _has_repository(self) -> bool:
        with self._errors():
            try:
                self._filesystem.resolve_path(self._path)
            except FileNotFoundError:
                return False
        return True

    def _put(self, source: Path, target: str, on_bytes: OnBytes) -> None:
        files = sorted(source.iterdir()) if source.is_dir() else [source]
        sizes = [path.stat().st_size for path in files]
        on_bytes(0, sum(sizes))
        for start in range(0, len(files), _FILES_PER_CALL):
            end = start + _FILES_PER_CALL
            targets = [f"{target}/{path.name}" if source.is_dir() else target for path in files[start:end]]
            self._filesystem.put([str(path) for path in files[start:end]], targets)
            on_bytes(sum(sizes[:end]), sum(sizes))

    def _errors(self) -> AbstractContextManager[None]:
        return file_system_errors(self._url, to_write=True)


#: Destination of an output.
Destination = Local | Remote


def destination_of(out: str | Path) -> Destination:
    """Return the destination at a path or URL.

    Raises:
        ImportError: If a package is missing that writes to the URL.
        ValueError: If the URL cannot be written.
    """
    return Remote(str(out)) if is_remote(out) else Local(Path(out))


def stat(path: Path) -> Stat | None:
    """Return names, sizes and times of writing of a file or of the files in a folder, or None if there is none.

    They do not change when the files are moved on their disk, and are the same on every machine that shares it.
    """
    if not path.exists():
        return None
    files = {entry.name: entry.stat() for entry in sorted(path.iterdir())} if path.is_dir() else {"": path.stat()}
    return [[name, status.st_size, status.st_mtime_ns] for name, status in files.items()]


def has_begun(uploaded: Stat | None, whole: Sequence[Sequence[Any]] | None) -> bool:
    """Whether an upload of the whole has begun: all uploaded files have the names and sizes of files of the whole."""
    sizes = {SUCCESS: 0, **{name: size for name, size, _ in whole or ()}}
    return bool(whole and uploaded) and all(sizes.get(name) == size for name, size, _ in uploaded or ())


def _check_same(destination: Destination, before: Stat | None) -> None:
    if destination.stat() != before:
        raise FileExistsError(
            f"{destination} was written by another program during the run: it is left as it is, and finished work is "
            "kept. Move it elsewhere, then run the same command again to finish."
        )
