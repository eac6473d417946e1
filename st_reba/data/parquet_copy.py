"""Copy of text files of any kind and size as one Parquet file, whose row groups are the chunks.

Writing the copy checks every row. Chunks are read from it in any order.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from .columns import TEXTS, Column, Schema, any_text, opened
from .sources import BATCH, File, listed, parquet_batches, parquet_schema, read_rows

_TEXT = TEXTS.columns[0]


class ParquetCopy:
    """Copy written by :meth:`TextFiles.copy`.

    Attributes:
        starts: First row of each chunk, from 0, and the number of all rows.
    """

    def __init__(self, path: Path | pa.NativeFile) -> None:
        self._file = pq.ParquetFile(path)
        groups = self._file.metadata
        self.starts = [0, *accumulate(groups.row_group(number).num_rows for number in range(groups.num_row_groups))]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, number: int) -> tuple[list[str], pa.Table]:
        """Return the texts and the kept columns of a chunk."""
        table = self._file.read_row_group(number)
        # By position, as a kept column may have the name of the texts' column.
        return table.column(0).to_pylist(), table.select(list(range(1, table.num_columns)))


@dataclass(frozen=True)
class TextFiles:
    """Text files that are read as one.

    Attributes:
        files: Files in order: see :func:`st_reba.data.sources.files_of`.
        column: Column of the texts, except in plain text. None means ``"text"`` or one of its known synonyms.
        keep: Columns to keep with the texts. Plain text has only ``"text"``.
        separator: Separator of the columns: see :meth:`st_reba.data.sources.File.separate`.
    """

    files: Sequence[File]
    column: str | None = None
    keep: Sequence[str] = ()
    separator: str | None = None

    def check(self) -> None:
        """Check that the first file has the text column and the kept columns.

        Raises:
            ValueError: If a column is missing.
        """
        next(self._rows(self.files[0], self.keep), None)

    def copy(self, stream: IO[bytes], smallest: int, largest: int, on_rows: Callable[[int], None]) -> None:
        """Write the texts and the kept columns to a Parquet file.

        A kept column has the type that holds all of its values unchanged. Cells of TSV and CSV are strings.

        Args:
            stream: Stream to write to.
            smallest: Rows of the first chunks.
            largest: Rows of the last chunks: see :func:`chunk_end`.
            on_rows: Called with the number of rows read.

        Raises:
            ValueError: If a text is invalid, a kept value cannot be written unchanged, or there are no rows. The
                message names file and line.
        """
        schema = pa.schema([pa.field("text", pa.large_string()), *self._kept(on_rows)])
        done, held = 0, schema.empty_table()
        with pq.ParquetWriter(stream, schema, compression="zstd", use_compliant_nested_type=False) as writer:
            for where, columns in (batch for file in self.files for batch in self._batches(file)):
                arrays = []
                for field, values in zip(schema, columns, strict=True):
                    with _unchanged(where, field.name):
                        is_array = isinstance(values, pa.Array)
                        arrays.append(values.cast(field.type) if is_array else pa.array(values, field.type))
                held = pa.concat_tables([held, pa.table(arrays, schema=schema)])
                while len(held) >= (size := chunk_end(done, smallest, largest) - done):
                    writer.write_table(held.slice(0, size), row_group_size=size)
                    held, done = held.slice(size), done + size
                on_rows(done + len(held))
            if len(held):
                writer.write_table(held, row_group_size=len(held))
            elif not done:
                raise ValueError(f"{self.files[0].name} holds no texts.")

    def _kept(self, on_rows: Callable[[int], None]) -> pa.Schema:
        """Return the types that hold every kept value unchanged, for which all rows of JSON must be read."""
        fields: dict[str, pa.Field] = {}
        done = 0
        for file in self.files if self.keep else ():
            for where, columns in self._batches(file) if file.kind == "jsonl" else [(file.name, [])]:
                for number, name in enumerate(self.keep, 1):
                    with _unchanged(where, name):
                        if file.kind == "parquet":
                            field = parquet_schema(file).field(name)
                        else:
                            field = pa.field(name, pa.array(columns[number]).type if columns else pa.string())
                        both = [pa.schema([fields.get(name, field)]), pa.schema([field])]
                        fields[name] = pa.unify_schemas(both, promote_options="permissive").field(0)
                done += len(columns[0]) if columns else 0
                on_rows(done)
        for name, field in fields.items():
            if pa.types.is_null(field.type) and self.files[0].kind == "jsonl":
                raise ValueError(f'{self.files[0].name}: "{name}" has no value in any row: do not keep it.')
            with _unchanged(self.files[0].name, name):
                # Not all types can be written to Parquet and read again.
                pq.write_table(pa.schema([field]).empty_table(), written := io.BytesIO())
                pq.read_table(written)
        return pa.schema(list(fields.values()))

    def _batches(self, file: File) -> Iterator[tuple[str, list[Any]]]:
        """Yield batches of rows: their place for messages, and their columns, the texts first."""
        content = self._rows(file, self.keep)
        if file.kind == "parquet" and self.keep:
            content = self._rows(file, ())
            for before, batch in parquet_batches(file, self.keep):
                texts, end = [text for _, (text,) in islice(content, len(batch))], before + len(batch)
                yield f"{file.name}, rows {before + 1} to {end}", [texts, *map(batch.column, self.keep)]
        while batch := list(islice(content, BATCH)):
            lines, values = zip(*batch, strict=True)
            yield f"{file.name}, {file.unit}s {lines[0]} to {lines[-1]}", list(zip(*values, strict=True))

    def _rows(self, file: File, keep: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
        """Yield the line of each row, and its text and kept values."""
        file.separate(self.separator)
        if file.kind == "txt":
            if self.column is not None:
                reason = f'plain text has no column "{self.column}"'
                raise ValueError(f"{file.name}: {reason}. Leave out --column, or give JSON lines.")
            if any(name != "text" for name in keep):
                reason = f"plain text has no columns to keep such as {listed(keep)}"
                raise ValueError(f'{file.name}: {reason}. Keep "text", or give JSON lines.')
            # An empty line is an empty text, so that rows stay aligned.
            return ((line, [text, *(text for _ in keep)]) for line, text in read_rows(file))
        others = _TEXT.others if self.column is None else ""
        # Some lines of JSON may lack a kept column.
        kept = (Column(name, "", lambda cell: cell, needed=file.kind != "jsonl") for name in keep)
        columns = (Column(self.column or "text", others, any_text), *kept)
        remedy = "If the first line gives the column another name, give that as --column."
        return opened(file, [Schema("texts", columns, remedy, headed=self.column is not None or len(keep) > 0)])[1]


def chunk_end(row: int, smallest: int, largest: int) -> int:
    """Return the end of the chunk that contains a row.

    The first eight chunks have ``smallest`` rows. The size doubles whenever the number of preceding rows has doubled,
    up to ``largest``. So a killed run of few texts loses little, and a run of many texts has few chunks.
    """
    size = min(smallest, largest)
    while size < largest and row >= 8 * size:
        size = min(2 * size, largest)
    return (row // size + 1) * size


@contextmanager
def _unchanged(where: str, name: str) -> Iterator[None]:
    """Raise a ValueError for values that no type holds."""
    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise ValueError(
            f'{where}: no single type holds all values of "{name}" unchanged ({error}). Write them as strings, or do '
            "not keep the column."
        ) from None
