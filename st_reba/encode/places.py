"""Where an output goes: to a path of this machine, or to a URL that fsspec writes to."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import cached_assets_path

from ..data.sources import is_remote
from ..files import flush_directory, is_full
from ..optional import require

#: A file, or the files of a folder: name (empty for a file), size, and what changes when it is written.
Looks = list[list[str | int]]
#: Called with how many bytes are uploaded, and of how many.
OnBytes = Callable[[int, int], None]

#: The last file of a folder on an object store: the folder is whole where it lies.
SUCCESS = "_SUCCESS"
#: Protocols of object stores: a file is there whole when its upload ends, and not before. A move would be a copy.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hf"}
#: Files that are uploaded between two calls of ``on_bytes``; fsspec sends several at a time where it can.
_TOGETHER = 64


class Local:
    """A file, or a directory, on this machine.

    Attributes:
        path: Where it lies.
        work: What the run's folder is named by.
        suffix: Of its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = self.work = path.absolute()
        self.suffix = path.suffix

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str] | None:
        """The names in a directory; an empty name for a file; None: there is neither."""
        if not self.path.exists():
            return None
        return [path.name for path in self.path.iterdir()] if self.path.is_dir() else [""]

    def looks(self) -> Looks | None:
        """What tells what lies there from what may lie there later; None: nothing does."""
        return looks(self.path)

    def take(self, finished: Path, before: Looks | None, replaced: Path, on_bytes: OnBytes) -> None:
        """Move what is finished, a file or a directory, to its place.

        Args:
            finished: What is moved.
            before: What :meth:`looks` said when the run began.
            replaced: Where a directory that was there is put, on the same disk.
            on_bytes: Not called: a move takes no time.

        Raises:
            FileExistsError: If something else lies there now: it is left as it is, and so is what is finished.
        """
        if self.looks() != before:
            raise _appeared(self)
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
        path: Where it lies if the URL names a file of this machine; else None.
        work: What the run's folder on this machine is named by.
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
        self._protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        name = PurePosixPath(self._path).name
        is_bucket = bool(self._protocols & _OBJECT_STORES) and "/" not in self._path.strip("/")
        if not name or is_bucket or self._protocols & {"http", "https"}:
            raise ValueError(
                f"--out {url}: nothing is written there. Give the URL of a file or a folder that can be written, such "
                "as s3://bucket/vectors.parquet."
            )
        if "hf" in self._protocols and not self._has_repository():
            raise ValueError(
                f"--out {url}: the Hub has no such repository, or does not show it to you. Make it first, or log in "
                "with `hf auth login`."
            )
        self.path = Path(self._path) if "file" in self._protocols else None
        self.suffix = PurePosixPath(name).suffix
        digest = hashlib.sha256(self._url.encode()).hexdigest()[:16]
        self.work = cached_assets_path("st_reba", "encode") / f"{digest}-{name}"

    def __str__(self) -> str:
        return self._url

    def names(self) -> list[str] | None:
        """The names in a folder; an empty name for a file; None: there is neither."""
        found = self.looks()
        return None if found is None else [str(name) for name, *_ in found]

    def looks(self) -> Looks | None:
        """What tells what lies there from what may lie there later; None: nothing does."""
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
        uploaded beside its place, under a hidden name, and moved.

        Args:
            finished: A file or a directory.
            before: What :meth:`looks` said when the run began.
            replaced: Not used: what is there is removed.
            on_bytes: Called as the upload goes on.

        Raises:
            FileExistsError: If something else lies there now: it is left as it is.
            OSError: If it cannot be written; the upload may be tried again.
        """
        if self.looks() != before:
            raise _appeared(self)
        is_folder = finished.is_dir()
        with self._asking():
            if is_folder and before is not None:
                self._filesystem.rm(self._path, recursive=True)
            if self._protocols & _OBJECT_STORES:
                self._put(finished, self._path, on_bytes)
                if is_folder:
                    self._filesystem.pipe_file(f"{self._path}/{SUCCESS}", b"")
                return
            above, _, name = self._path.rpartition("/")
            # The same name each time, so that what a killed upload has left goes; another one on another machine.
            own = hashlib.sha256(f"{platform.node()}:{self.work}".encode()).hexdigest()[:8]
            scratch = f"{above}/.{name}.uploading-{own}"
            if self._filesystem.exists(scratch):
                self._filesystem.rm(scratch, recursive=True)
            self._filesystem.makedirs(scratch if is_folder else above, exist_ok=True)
            self._put(finished, scratch, on_bytes)
            if self._filesystem.isdir(self._path):
                # An empty one: a folder that is moved to it would come to lie in it.
                self._filesystem.rm(self._path, recursive=True)
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

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """What a file system refuses, in a sentence: each has errors of its own."""
        try:
            yield
        except ImportError as error:
            # fsspec's words for it, and the module that it could not import.
            missing = getattr(error.__cause__, "name", None)
            more = f": pip install {missing}" if missing else ""
            raise ImportError(f"--out {self}: fsspec cannot write there ({str(error).strip()}){more}.") from None
        except Exception as error:
            if is_full(error):
                raise
            raise OSError(
                f"{self} cannot be written ({str(error).strip() or type(error).__name__}). What is done is kept on "
                "this machine, and the same command goes on."
            ) from error


#: One of the two.
Place = Local | Remote


def place_of(out: str | Path) -> Place:
    """The place that a user names.

    Raises:
        ImportError: If a package is missing that writes there.
        ValueError: If nothing can be written to such a URL.
    """
    return Remote(str(out)) if is_remote(out) else Local(Path(out))


def looks(path: Path) -> Looks | None:
    """Tells a file, or a folder of files, from what it may be later; None: there is none.

    Names, sizes and times of writing: they are the same wherever it is moved on its disk, and on every machine that
    shares it.
    """
    if not path.exists():
        return None
    files = {entry.name: entry.stat() for entry in sorted(path.iterdir())} if path.is_dir() else {"": path.stat()}
    return [[name, status.st_size, status.st_mtime_ns] for name, status in files.items()]


def part_of(found: Sequence[Sequence[Any]], whole: Sequence[Sequence[Any]]) -> bool:
    """Whether all files that are found have the names and sizes of files of the whole: an upload that has begun."""
    sizes = {SUCCESS: 0, **{name: size for name, size, _ in whole}}
    return all(sizes.get(name) == size for name, size, _ in found)


def _appeared(place: Place) -> FileExistsError:
    return FileExistsError(
        f"{place} appeared, or was written, while this ran: it is left as it is, and all that is done is kept. Move "
        "it elsewhere, and the same command ends the run."
    )
