"""Folder next to the output, in which a run keeps its finished parts until the output is complete.

An output is an ``.npy`` file, a Parquet file, or a directory of Parquet shards. Its kind is the suffix of its path:
``".npy"``, ``".parquet"``, or ``""`` for a directory. A part is a Parquet file with the vectors of one chunk.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..data.sources import native_file
from ..files import acquired, atomic_file, remove_scratch
from .destinations import SUCCESS, Destination, Stat, stat

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
            raise ValueError(
                f"{self.path} holds an interrupted run with other settings: {changes}. Use those, choose another "
                "--out, or start again with --overwrite."
            )
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
        with path.open("rb") as stream:
            digests[path] = hashlib.file_digest(stream, "sha256").hexdigest()
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
