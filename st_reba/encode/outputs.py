"""Files of vectors: ``.npy``, Parquet, or a directory of Parquet shards. Parts first, the whole at the end.

A kind of output is the suffix of its path: ``".npy"``, ``".parquet"``, or ``""`` for a directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..files import atomic_file
from .places import SUCCESS, Place

#: Called with how many vectors have been written.
OnRows = Callable[[int], None]

#: The column of the vectors in Parquet.
EMBEDDING = "embedding"
#: Those of a sparse model's weights, and that of a vector for each token.
OF_LISTS = ("indices", "values", "vectors")
#: Those of a chunk: its text's row in the input, from 0, and its characters there, the first and one past the last.
OF_CHUNKS = ("document", "start", "end")

_PART = re.compile(r"part-(\d{8,})\.(npy|parquet)")


def kind_of(place: Place) -> str:
    """The kind of output that a place asks for.

    Raises:
        ValueError: If it is none, or something else lies there, which is not to be replaced.
    """
    if place.suffix not in (".npy", ".parquet", ""):
        raise ValueError(f"--out {place}: end it in .npy or .parquet, or in nothing for a directory of Parquet shards.")
    names = place.names()
    if place.suffix and names not in (None, [""]):
        raise ValueError(f"{place} is a directory: choose another --out, or remove it.")
    if not place.suffix and not all(_PART.fullmatch(name) or name == SUCCESS for name in names or ()):
        raise ValueError(f"{place} holds something other than shards: choose another --out, or remove it.")
    return place.suffix


def part_name(kind: str, number: int) -> str:
    """The file name of a part; names sort as the rows do."""
    return f"part-{number:08d}{kind or '.parquet'}"


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


def write_part(kind: str, stream: IO[bytes], vectors: np.ndarray, kept: pa.Table) -> None:
    """Write ``vectors (rows, values)``; to Parquet, beside a table of kept columns, which may have none."""
    if kind == ".npy":
        np.save(stream, vectors)
        return
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    table = kept.append_column(EMBEDDING, column)
    pq.write_table(table, stream, row_group_size=max(1, len(vectors)), use_dictionary=_repeating(table.schema))


def write_lists(stream: IO[bytes], columns: Mapping[str, pa.Array], kept: pa.Table) -> None:
    """Write columns of lists, a row a text, to Parquet beside kept columns."""
    for name, values in columns.items():
        kept = kept.append_column(name, values)
    pq.write_table(kept, stream, row_group_size=max(1, len(kept)), use_dictionary=_repeating(kept.schema))


def rows_of(part: Path) -> int:
    """How many vectors a part holds."""
    return len(np.load(part, mmap_mode="r")) if part.suffix == ".npy" else pq.read_metadata(part).num_rows


def assemble(kind: str, parts: Sequence[Path], rows: int, whole: Path, on_rows: OnRows) -> Path:
    """Make the whole of all parts, in their order: a file at ``whole``, or their own folder. Returns where it is.

    Args:
        kind: Of the output.
        parts: All parts; they stay.
        rows: How many vectors they hold.
        whole: A place for a file. What lies there was made by an earlier call, to its end.
        on_rows: Called as the work goes on.
    """
    if not kind:
        return parts[0].parent
    if not whole.exists():
        with atomic_file(whole) as stream:
            (_assemble_npy if kind == ".npy" else _assemble_parquet)(parts, rows, stream, on_rows)
    return whole


def _assemble_npy(parts: Sequence[Path], rows: int, stream: IO[bytes], on_rows: OnRows) -> None:
    """The bytes that ``numpy.save`` would write."""
    first = np.load(parts[0], mmap_mode="r")
    kind = np.lib.format.dtype_to_descr(first.dtype)
    shape = (rows, *first.shape[1:])
    np.lib.format.write_array_header_1_0(stream, {"descr": kind, "fortran_order": False, "shape": shape})
    done = 0
    for path in parts:
        vectors = np.load(path)
        stream.write(vectors.data)
        done += len(vectors)
        on_rows(done)


def _assemble_parquet(parts: Sequence[Path], rows: int, stream: IO[bytes], on_rows: OnRows) -> None:
    """The kept columns, and the vectors as fixed-size lists. A row group is a chunk."""
    schema = pq.read_schema(parts[0])
    done = 0
    with pq.ParquetWriter(stream, schema, use_dictionary=_repeating(schema)) as writer:
        for path in parts:
            table = pq.read_table(path, partitioning=None)
            writer.write_table(table)
            done += table.num_rows
            on_rows(done)


def _repeating(schema: pa.Schema) -> list[str] | bool:
    """Columns whose values may repeat: vectors never do."""
    return [name for name in schema.names if name not in (EMBEDDING, *OF_LISTS)] or False
