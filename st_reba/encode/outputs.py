"""Files of vectors: ``.npy``, Parquet, or a directory of Parquet shards. Parts first, the whole at the end."""

from __future__ import annotations

import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..files import atomic_file

#: Called with how many vectors have been written.
OnRows = Callable[[int], None]

#: The column of the vectors in Parquet.
EMBEDDING = "embedding"
#: Those of a chunk: its text's row in the input, from 0, and its characters there, the first and one past the last.
DOCUMENT, START, END = "document", "start", "end"

_PART = re.compile(r"part-(\d{8,})\.(npy|parquet)")


class Output(ABC):
    """How vectors are kept, in parts of a chunk each and as a whole. Plain data, for worker processes.

    Attributes:
        kind: Its name in a run's manifest.
        suffix: Of a part's file name.
    """

    kind: str
    suffix: str

    def part(self, number: int) -> str:
        """The file name of a part; names sort as the rows do."""
        return f"part-{number:08d}{self.suffix}"

    @abstractmethod
    def write_part(self, stream: IO[bytes], vectors: np.ndarray, kept: pa.Table) -> None:
        """Write ``vectors (rows, values)`` and a table of kept columns, which may have none."""

    @abstractmethod
    def assemble(self, parts: Sequence[Path], rows: int, whole: Path, on_rows: OnRows) -> Path:
        """Make the whole of all parts, in their order: at ``whole``, or where they lie. Returns where it is.

        Args:
            parts: All parts; they stay.
            rows: How many vectors they hold.
            whole: A place for a file. What lies there was made by an earlier call, to its end.
            on_rows: Called as the work goes on.
        """

    def rows(self, parts: Sequence[Path]) -> int:
        """How many vectors the parts hold."""
        raise NotImplementedError

    def check_target(self, target: Path) -> None:
        """Refuse to replace what is no output of this kind.

        Raises:
            ValueError: If ``target`` is something else.
        """
        if target.is_dir():
            raise ValueError(f"{target} is a directory: choose another --out, or remove it.")


class NpyOutput(Output):
    """One NumPy array, (rows, values): the bytes that ``numpy.save`` would write."""

    kind = suffix = ".npy"

    def write_part(self, stream: IO[bytes], vectors: np.ndarray, kept: pa.Table) -> None:
        np.save(stream, vectors)

    def rows(self, parts: Sequence[Path]) -> int:
        return sum(len(np.load(path, mmap_mode="r")) for path in parts)

    def assemble(self, parts: Sequence[Path], rows: int, whole: Path, on_rows: OnRows) -> Path:
        if whole.exists():
            return whole
        first = np.load(parts[0], mmap_mode="r")
        header = {
            "descr": np.lib.format.dtype_to_descr(first.dtype),
            "fortran_order": False,
            "shape": (rows, *first.shape[1:]),
        }
        with atomic_file(whole) as stream:
            np.lib.format.write_array_header_1_0(stream, header)
            done = 0
            for path in parts:
                with path.open("rb") as part:
                    np.lib.format.read_magic(part)
                    (count, *_), _, _ = np.lib.format.read_array_header_1_0(part)
                    shutil.copyfileobj(part, stream, 1 << 20)
                done += count
                on_rows(done)
        return whole


class ParquetOutput(Output):
    """One Parquet file: the kept columns, and the vectors as fixed-size lists. A row group is a chunk."""

    kind = suffix = ".parquet"

    def write_part(self, stream: IO[bytes], vectors: np.ndarray, kept: pa.Table) -> None:
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        table = kept.append_column(EMBEDDING, column)
        pq.write_table(table, stream, **_layout(table.schema, len(vectors)))

    def rows(self, parts: Sequence[Path]) -> int:
        return sum(pq.read_metadata(path).num_rows for path in parts)

    def assemble(self, parts: Sequence[Path], rows: int, whole: Path, on_rows: OnRows) -> Path:
        if whole.exists():
            return whole
        schema = pq.read_schema(parts[0])
        layout = _layout(schema)
        with atomic_file(whole) as stream, pq.ParquetWriter(stream, schema, **layout) as writer:
            done = 0
            for path in parts:
                table = pq.read_table(path, partitioning=None)
                writer.write_table(table)
                done += table.num_rows
                on_rows(done)
        return whole


class ShardsOutput(ParquetOutput):
    """A directory of Parquet files, one a chunk: at the end they are moved, not copied."""

    kind = "directory"

    def assemble(self, parts: Sequence[Path], rows: int, whole: Path, on_rows: OnRows) -> Path:
        return parts[0].parent

    def check_target(self, target: Path) -> None:
        if target.exists() and not (target.is_dir() and all(_PART.fullmatch(path.name) for path in target.iterdir())):
            raise ValueError(f"{target} holds something other than shards: choose another --out, or remove it.")


def output_for(out: Path) -> Output:
    """The kind of output that a path's suffix asks for.

    Raises:
        ValueError: If it is none.
    """
    if out.suffix == ".npy":
        return NpyOutput()
    if out.suffix not in (".parquet", ""):
        raise ValueError(f"--out {out}: end it in .npy or .parquet, or in nothing for a directory of Parquet shards.")
    return ParquetOutput() if out.suffix else ShardsOutput()


def part_number(path: Path) -> int:
    """Which chunk a part holds.

    Raises:
        ValueError: If the name is not a part's.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        raise ValueError(
            f"{path} is not part of a run: move it elsewhere. What is done is kept, and the same command goes on."
        )
    return int(match[1])


def _layout(schema: Any, rows: int | None = None) -> dict[str, Any]:
    """Kept columns may repeat; vectors never do."""
    others = [name for name in schema.names if name != EMBEDDING]
    return {"use_dictionary": others or False, **({"row_group_size": rows} if rows else {})}
