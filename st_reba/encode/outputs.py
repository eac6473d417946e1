"""Files of vectors: ``.npy``, Parquet, or a directory of Parquet shards. Parts first, the whole at the end.

A kind of output is the suffix of its path: ``".npy"``, ``".parquet"``, or ``""`` for a directory. A part is a Parquet
file with a chunk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..files import atomic_file
from .places import SUCCESS, Looks, Place

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
    schema, tables = pq.read_schema(parts[0]), _read(parts, on_rows)
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
        table = pq.read_table(path, partitioning=None)
        yield table
        done += len(table)
        on_rows(done)


def _repeating(schema: pa.Schema) -> list[str] | bool:
    """Return the columns whose values may repeat: vectors never do."""
    return [name for name in schema.names if name not in (EMBEDDING, *OF_LISTS)] or False
