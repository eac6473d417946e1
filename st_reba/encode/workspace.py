"""Folder of a run's finished parts, and destination of its output.

The destination is a path of this machine, or a URL that fsspec writes to. The folder is next to it, or on this machine
for a URL. An output is an ``.npy`` file, a Parquet file, or a directory of Parquet shards. Its kind is the suffix of
its path: ``".npy"``, ``".parquet"``, or ``""`` for a directory. A part is a Parquet file with the vectors of one chunk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import cached_assets_path

from ..data.sources import file_system_errors, is_remote, native_file
from ..files import acquired, atomic_file, flush_directory, remove_scratch
from ..fingerprint import digest_of_file
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
            problem = f"--out {url} cannot be written."
            raise ValueError(f"{problem} Give the URL of a file or a folder, such as s3://bucket/vectors.parquet.")
        if "hf" in protocols and not self._has_repository():
            problem = f"--out {url}: the Hub has no such repository, or you may not see it."
            raise ValueError(f"{problem} Create it first, or log in with `hf auth login`.")
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
        folder = self._path.strip("/")
        return [
            [name.strip("/").removeprefix(folder).lstrip("/"), info["size"], utils.tokenize(info)]
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
    if not whole or not uploaded:
        return False
    sizes = {SUCCESS: 0} | {name: size for name, size, _ in whole}
    return all(sizes.get(name) == size for name, size, _ in uploaded)


def _check_same(destination: Destination, before: Stat | None) -> None:
    if destination.stat() != before:
        raise FileExistsError(
            f"{destination} was written by another program during the run: it is left as it is, and finished work is "
            "kept. Move it elsewhere, then run the same command again to finish."
        )


# Folder of a run

Settings = dict[str, str | int | bool | None]


class Workspace:
    """Folder ``OUT.partial`` with the settings of a run and its finished parts.

    It is plain data, which can be sent to worker processes.

    Attributes:
        parts: Folder of the chunks' vectors.
        texts: Input as a Parquet file whose row groups are the chunks.
        whole: Complete output, before it is moved to its destination.
        replaced: Previous output, while it is replaced.
        input: Folder of copies of remote files.
    """

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f"{out.name}.partial")
        self.parts = self.path / "parts"
        self.texts = self.path / "texts.parquet"
        self.whole = self.path / "whole"
        self.replaced = self.path / "replaced"
        # Hidden, as it is made before the manifest, which marks the folder as that of a run.
        self.input = self.path / ".input"
        self._manifest = self.path / "manifest.json"

    def part(self, number: int) -> Path:
        """Return the path of a chunk's vectors. Paths sort in the order of the rows."""
        return self.parts / f"part-{number:08d}.parquet"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder, and remove it if the run fails before its first part.

        Raises:
            ValueError: If another process has locked it, or it is not the folder of a run.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self._manifest.is_file() or all(path.name.startswith(".") for path in self.path.iterdir())):
            raise ValueError(f"{self.path} is not the folder of a run: remove it, or choose another --out.")
        lock = acquired(self.path / ".lock", f"{self.path} is in use: another process is writing this output.")
        try:
            yield
        finally:
            is_empty = not (self.parts.is_dir() and any(self.parts.iterdir()))
            lock.release()
            if is_empty:
                self.remove()

    def begin(self, settings: Settings, overwrite: bool) -> None:
        """Begin a run, or resume an interrupted one with the same settings.

        Raises:
            ValueError: If the interrupted run has other settings, unless ``overwrite`` is set.
        """
        remove_scratch(self.path)
        before = self._read()
        before.pop("finished", None)
        if before and before != settings and not overwrite:
            names = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
            changes = ", ".join(f"{name} {before.get(name)!r} (now {settings.get(name)!r})" for name in names)
            problem = f"{self.path} holds an interrupted run with other settings: {changes}."
            raise ValueError(f"{problem} Use those, choose another --out, or start again with --overwrite.")
        _remove(self.replaced)
        if before != settings:
            for path in (self.parts, self.texts, self.whole):
                _remove(path)
            # Last, as a folder that has files but no manifest is refused.
            self._write(settings)
        self.parts.mkdir(exist_ok=True)
        remove_scratch(self.parts)

    def finish(self, settings: Settings, **summary: Any) -> None:
        """Write a summary of the complete output, by which a later run recognizes it at its destination."""
        self._write({**settings, "finished": summary})

    def finished(self, settings: Settings) -> dict[str, Any]:
        """Return the summary of a complete output with these settings, or an empty one."""
        manifest = self._read()
        summary: dict[str, Any] = manifest.pop("finished", {})
        return summary if manifest == settings else {}

    def remove(self) -> None:
        """Remove the folder, the manifest last, so that an interrupted removal can be resumed."""
        if self.path.is_dir():
            for path in self.path.iterdir():
                if path != self._manifest:
                    _remove(path)
            shutil.rmtree(self.path, ignore_errors=True)

    def _read(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(self._manifest.read_text("utf-8")) if self._manifest.is_file() else {}
        return manifest

    def _write(self, manifest: Mapping[str, Any]) -> None:
        with atomic_file(self._manifest) as stream:
            stream.write(json.dumps(manifest, indent=1).encode())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_unchanged(before: Mapping[Path, object]) -> None:
    """Check that files still have their previous :func:`stat`.

    Raises:
        ValueError: If a file has changed.
    """
    for path, previous in before.items():
        if stat(path) != previous:
            raise ValueError(
                f"{path} was changed during the run. Restore it and run the same command again to resume, or start "
                "again with --overwrite."
            )


def file_digests(paths: Iterable[Path], on_bytes: Callable[[int, int], None]) -> dict[Path, str]:
    """Return the SHA-256 of each file in hexadecimal.

    Args:
        paths: The files.
        on_bytes: Called with the number of bytes read and of all bytes.
    """
    sizes, digests, done = {path: path.stat().st_size for path in paths}, {}, 0
    for path, size in sizes.items():
        on_bytes(done, sum(sizes.values()))
        digests[path] = digest_of_file(path)
        done += size
    return digests


#: Called with the number of written vectors.
OnRows = Callable[[int], None]

#: Column of the vectors.
EMBEDDING = "embedding"
#: Columns of lists: sparse weights, and token vectors.
OF_LISTS = ("indices", "values", "vectors")
#: Columns of a chunk: row of its text in the input, from 0, and its first character and one past the last.
OF_CHUNKS = ("document", "start", "end")

_PART = re.compile(r"part-\d{8,}\.parquet")


def kind_of(destination: Destination, existing: Stat | None) -> str:
    """Return the kind of output that belongs at a destination.

    Args:
        destination: Destination of the output.
        existing: Result of its ``stat()``.

    Raises:
        ValueError: If the suffix is unknown, or the existing files are not an output of this kind.
    """
    if destination.suffix not in (".npy", ".parquet", ""):
        raise ValueError(f"--out {destination}: end it in .npy or .parquet, or in no suffix for a directory of shards.")
    names = [name for name, *_ in existing or ()]
    if destination.suffix and existing is not None and names != [""]:
        raise ValueError(f"{destination} is a directory: choose another --out, or remove it.")
    if not destination.suffix and not all(_PART.fullmatch(str(name)) or name == SUCCESS for name in names):
        raise ValueError(f"{destination} holds files other than shards: choose another --out, or remove it.")
    return destination.suffix


def write_part(stream: IO[bytes], table: pa.Table) -> None:
    """Write the vectors and kept columns of a chunk."""
    pq.write_table(table, stream, row_group_size=max(1, len(table)), use_dictionary=_repeating(table.schema))


def assemble(kind: str, parts: Sequence[Path], rows: int, whole: Path, on_rows: OnRows) -> Path:
    """Join all parts in order, and return the path of the whole: ``whole``, or the parts' folder for shards.

    Args:
        kind: Kind of output.
        parts: All parts, which are kept.
        rows: Number of vectors in all parts.
        whole: Path of the file. An existing one is complete, and is used.
        on_rows: Called after each part.
    """
    if not kind:
        return parts[0].parent
    if whole.exists():
        return whole
    schema, tables = pq.read_schema(native_file(parts[0])), _read(parts, on_rows)
    with atomic_file(whole) as stream:
        if kind == ".parquet":
            with pq.ParquetWriter(stream, schema, use_dictionary=_repeating(schema)) as writer:
                for table in tables:
                    writer.write_table(table)
            return whole
        # The same bytes as those of numpy.save.
        vectors = schema.field(EMBEDDING).type
        dtype = np.lib.format.dtype_to_descr(np.dtype(vectors.value_type.to_pandas_dtype()))
        header = {"descr": dtype, "fortran_order": False, "shape": (rows, vectors.list_size)}
        np.lib.format.write_array_header_1_0(stream, header)
        for table in tables:
            for chunk in table[EMBEDDING].chunks:
                stream.write(chunk.flatten().to_numpy().data)
    return whole


def _read(parts: Sequence[Path], on_rows: OnRows) -> Iterator[pa.Table]:
    done = 0
    for path in parts:
        table = pq.read_table(native_file(path), partitioning=None)
        yield table
        done += len(table)
        on_rows(done)


def _repeating(schema: pa.Schema) -> list[str] | bool:
    """Return the columns that profit from a dictionary: all but those of vectors."""
    return [name for name in schema.names if name not in (EMBEDDING, *OF_LISTS)] or False
