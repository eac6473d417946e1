"""The folder next to the output in which a run keeps what it has done, until all of it takes the output's place.

An output is a file of vectors, ``.npy`` or Parquet, or a directory of Parquet shards; its kind is the suffix of its
path: ``".npy"``, ``".parquet"``, or ``""`` for a directory. A part is a Parquet file with a chunk.
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
from filelock import FileLock, Timeout

from ..data.sources import native_file
from ..files import atomic_file, remove_scratch
from .places import SUCCESS, Looks, Place, looks

Settings = dict[str, str | int | bool | None]


class Workspace:
    """``OUT.partial``: what was asked for, and the parts that are done. Plain data, for worker processes.

    Attributes:
        parts: Folder of the chunks' vectors.
        texts: The input as a Parquet file, whose row groups are the chunks.
        whole: The output, all of it, before it comes to its place.
        replaced: The output that is replaced, for a moment.
        input: Copies of files that are not on this machine.
    """

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f"{out.name}.partial")
        self.parts = self.path / "parts"
        self.texts = self.path / "texts.parquet"
        self.whole = self.path / "whole"
        self.replaced = self.path / "replaced"
        # Hidden: it is there before the manifest, which makes the folder a run's.
        self.input = self.path / ".input"
        self._manifest = self.path / "manifest.json"

    def part(self, number: int) -> Path:
        """Return the path of a chunk's vectors; names sort as the rows do."""
        return self.parts / f"part-{number:08d}.parquet"

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
            is_empty = not (self.parts.is_dir() and any(self.parts.iterdir()))
            lock.release()
            if is_empty:
                self.remove()

    def begin(self, settings: Settings, overwrite: bool) -> None:
        """Begin a run, or go on with an interrupted one of the same settings.

        Raises:
            ValueError: If other settings were used (``overwrite`` begins anew).
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

    def finish(self, settings: Settings, **noted: Any) -> None:
        """Note the look of the whole, which comes to its place next, by which a later run knows it there."""
        self._write({**settings, "finished": noted})

    def finished(self, settings: Settings) -> dict[str, Any]:
        """Return the notes of a run of these settings that has made the whole; else nothing."""
        noted = self._read()
        made: dict[str, Any] = noted.pop("finished", {})
        return made if noted == settings else {}

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


def file_digests(paths: Iterable[Path], on_bytes: Callable[[int, int], None]) -> dict[Path, str]:
    """Return the SHA-256 of whole files, as hexadecimal digits.

    Args:
        paths: The files.
        on_bytes: Called with how many bytes are read, and of how many.
    """
    sizes, digests, done = {path: path.stat().st_size for path in paths}, {}, 0
    for path, size in sizes.items():
        on_bytes(done, sum(sizes.values()))
        with path.open("rb") as stream:
            digests[path] = hashlib.file_digest(stream, "sha256").hexdigest()
        done += size
    return digests


#: Called with how many vectors have been written.
OnRows = Callable[[int], None]

#: Column of the vectors.
EMBEDDING = "embedding"
#: Columns of a sparse model's weights, and that of a vector for each token.
OF_LISTS = ("indices", "values", "vectors")
#: Columns of a chunk: its text's row in the input, from 0, and its characters there, the first and one past the last.
OF_CHUNKS = ("document", "start", "end")

_PART = re.compile(r"part-\d{8,}\.parquet")


def kind_of(place: Place, found: Looks | None) -> str:
    """Return the kind of output that a place asks for.

    Args:
        place: Where it goes.
        found: What lies there.

    Raises:
        ValueError: If it is none, or something else lies there, which is not to be replaced.
    """
    if place.suffix not in (".npy", ".parquet", ""):
        raise ValueError(f"--out {place}: end it in .npy or .parquet, or in nothing for a directory of Parquet shards.")
    names = [name for name, *_ in found or ()]
    if place.suffix and found is not None and names != [""]:
        raise ValueError(f"{place} is a directory: choose another --out, or remove it.")
    if not place.suffix and not all(_PART.fullmatch(str(name)) or name == SUCCESS for name in names):
        raise ValueError(f"{place} holds something other than shards: choose another --out, or remove it.")
    return place.suffix


def write_part(stream: IO[bytes], table: pa.Table) -> None:
    """Write the vectors of a chunk and what is kept with them."""
    pq.write_table(table, stream, row_group_size=max(1, len(table)), use_dictionary=_repeating(table.schema))


def assemble(kind: str, parts: Sequence[Path], rows: int, whole: Path, on_rows: OnRows) -> Path:
    """Make the whole of all parts, in their order: a file at ``whole``, or their own folder. Return its path.

    Args:
        kind: Of the output.
        parts: All parts; they stay.
        rows: How many vectors they hold.
        whole: Path of a file. If there is one, an earlier call has made it, to its end.
        on_rows: Called as the work goes on.
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
        # The bytes that numpy.save would write.
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
    """Return the columns whose values may repeat: vectors never do."""
    return [name for name in schema.names if name not in (EMBEDDING, *OF_LISTS)] or False
