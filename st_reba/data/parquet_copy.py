"""Files of texts, of any kind and size, as one Parquet file whose row group i is chunk i.

To write it is to check every row; it is read in any order, a chunk at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from .columns import TEXTS, Column, Schema, any_text, opened
from .rows import BATCH, LONGEST, TOO_LONG, listed, parquet_batches, parquet_file, rows
from .sources import FORMATS, File

_TEXT = TEXTS.columns[0]
_TEXTS = pa.field("text", pa.large_string())


class ParquetCopy:
    """A copy that :meth:`TextFiles.copy` has written.

    Attributes:
        starts: The row at which each chunk begins, from 0, and the number of all rows.
    """

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path)
        groups = self._file.metadata
        self.starts = [0, *accumulate(groups.row_group(number).num_rows for number in range(groups.num_row_groups))]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, number: int) -> tuple[list[str], pa.Table]:
        """The texts of a chunk, and what is kept of them."""
        table = self._file.read_row_group(number)
        # By their places: a kept column may be called as that of the texts.
        return table.column(0).to_pylist(), table.select(list(range(1, table.num_columns)))


@dataclass(frozen=True)
class TextFiles:
    """Files of texts, which are read as one.

    Attributes:
        files: In order: see :func:`st_reba.data.sources.files_of`.
        column: Where the texts are, in all but plain text; ``"text"`` if None, or one of the names that others use.
        keep: Columns to keep beside the texts; of plain text there is ``"text"`` alone.
    """

    files: Sequence[File]
    column: str | None = None
    keep: Sequence[str] = ()

    def check(self) -> None:
        """See that the files can be read, and have the columns that are asked for, as far as their beginning tells.

        Raises:
            ValueError: If one is no file, is of no known kind, or has no such columns.
        """
        for file in self.files:
            if not file.path.is_file():
                raise ValueError(
                    f"{file.name} is a pipe or a device, but texts are read more than once: write them to a file."
                )
            if not file.kind:
                raise ValueError(f"{file.name}: of no known format. Give {FORMATS}.")
        if self.files[0].kind == "parquet":
            self._parquet_columns(self.files[0])
        else:
            next(self._rows(self.files[0]), None)

    def copy(
        self,
        stream: IO[bytes],
        chunk_size: int,
        smallest: int | None = None,
        on_rows: Callable[[int], None] = lambda rows: None,
    ) -> None:
        """Write the texts and what is kept of them to a Parquet file.

        Kept columns of Parquet have its types, and cells are strings; a column of JSON lines has the type that holds
        all of its values unchanged.

        Args:
            stream: Where to.
            chunk_size: Rows of a chunk.
            smallest: Rows of the first chunks, which grow to ``chunk_size``: see :func:`chunk_end`. None: all chunks
                are of one size.
            on_rows: Called with how many rows have been read.

        Raises:
            ValueError: If a row is no text, or has a kept value that cannot be written as it is, naming file and line;
                or if there is no row; or files differ in what they keep.
        """
        schema = pa.schema([_TEXTS, *self._kept_schema(on_rows)])
        tables = chain.from_iterable(self._tables(file, schema) for file in self.files)
        done = 0
        with pq.ParquetWriter(stream, schema, compression="zstd", use_compliant_nested_type=False) as writer:
            for chunk in _in_chunks(tables, smallest or chunk_size, chunk_size):
                writer.write_table(chunk, row_group_size=len(chunk))
                done += len(chunk)
                on_rows(done)
        if not done:
            raise ValueError(f"{self.files[0].name} holds no texts.")

    def _kept_schema(self, on_rows: Callable[[int], None]) -> pa.Schema:
        """The types of what is kept, in all files."""
        parquet = next((file for file in self.files if file.kind == "parquet"), None)
        schema = pa.schema([(name, pa.string()) for name in self.keep])
        if parquet is not None:
            _, schema = self._parquet_columns(parquet)
        elif self.keep and any(file.kind == "jsonl" for file in self.files):
            schema = self._schema_of_values(on_rows)
        for field in schema:
            written = io.BytesIO()
            try:
                pq.write_table(pa.schema([field]).empty_table(), written)
                pq.read_table(written)
            except (pa.ArrowException, OSError) as error:
                said = f'Parquet cannot hold "{field.name}", {field.type}'
                raise ValueError(f"{self.files[0].name}: {said}: do not keep it ({error}).") from None
        return schema

    def _schema_of_values(self, on_rows: Callable[[int], None]) -> pa.Schema:
        """The types that hold every value of JSON lines unchanged: no row is enough to tell them."""
        schema = pa.schema([(name, pa.null()) for name in self.keep])
        done = 0
        for file in self.files:
            for lines, (_, *columns) in self._batches(file):
                for name, values in zip(self.keep, columns, strict=True):
                    with _unchanged(file, lines, name):
                        own = pa.schema([(name, pa.array(values).type)])
                        schema = pa.unify_schemas([schema, own], promote_options="permissive")
                done += len(lines)
                on_rows(done)
        for field in schema:
            if pa.types.is_null(field.type):
                raise ValueError(f'{self.files[0].name}: "{field.name}" has no value in any row: do not keep it.')
        return schema

    def _tables(self, file: File, schema: pa.Schema) -> Iterator[pa.Table]:
        """The texts of a file and what is kept of them, some rows at a time."""
        if file.kind == "parquet":
            yield from self._parquet_tables(file, schema)
            return
        for lines, columns in self._batches(file):
            arrays = []
            for field, values in zip(schema, columns, strict=True):
                with _unchanged(file, lines, field.name):
                    arrays.append(pa.array(values, field.type))
            yield pa.table(arrays, schema=schema)

    def _parquet_tables(self, file: File, schema: pa.Schema) -> Iterator[pa.Table]:
        name, kept = self._parquet_columns(file)
        for own, field in zip(kept, list(schema)[1:], strict=True):
            if own.type != field.type:
                first = self.files[0].name
                raise ValueError(f'{file.name}: column "{own.name}" is {own.type}, but {field.type} in {first}.')
        for done, batch in parquet_batches(file, list(dict.fromkeys((name, *self.keep)))):
            texts = batch.column(name)
            if texts.null_count:
                number = done + texts.is_null().index(True).as_py() + 1
                raise ValueError(f'{file.name}, row {number}: "{name}" is null, but a text is a string.')
            texts = texts.cast(_TEXTS.type)
            # Most batches are shorter than one text may be.
            if texts.nbytes > LONGEST and any(text.as_buffer().size > LONGEST for text in texts):
                raise ValueError(f'{file.name}, rows {done + 1} to {done + len(batch)}: a "{name}" that is {TOO_LONG}.')
            yield pa.table([texts, *(batch.column(each) for each in self.keep)], schema=schema)

    def _parquet_columns(self, file: File) -> tuple[str, pa.Schema]:
        """The column of texts, and the schema of those that are kept."""
        schema = parquet_file(file).schema_arrow
        name = self.column or _TEXT.find(schema.names) or "text"
        for each in (name, *self.keep):
            if each not in schema.names:
                raise ValueError(f'{file.name}: no column "{each}", but {listed(schema.names)}.')
            if (count := schema.names.count(each)) > 1:
                raise ValueError(f'{file.name}: {count} columns are called "{each}": give each a name of its own.')
        kind = schema.field(name).type
        values = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(values) or pa.types.is_large_string(values) or pa.types.is_string_view(values)):
            raise ValueError(f'{file.name}: column "{name}" is {kind}, but texts are strings.')
        return name, pa.schema([schema.field(each) for each in self.keep])

    def _batches(self, file: File) -> Iterator[tuple[list[int], list[tuple[Any, ...]]]]:
        """The lines of some rows at a time, and their texts and kept values as columns."""
        content = self._rows(file)
        while batch := list(islice(content, BATCH)):
            yield [line for line, _ in batch], list(zip(*(values for _, values in batch), strict=True))

    def _rows(self, file: File) -> Iterator[tuple[int, list[Any]]]:
        """Line, and text and kept values, of each row of a file of lines."""
        if file.kind == "txt":
            return self._lines(file)
        others = _TEXT.others if self.column is None else ()
        # A line of JSON may lack a kept column that another line has.
        kept = (Column(name, (), lambda cell: cell, needed=file.kind != "jsonl") for name in self.keep)
        columns = (Column(self.column or "text", others, any_text), *kept)
        named = self.column is not None or len(self.keep) > 0
        return opened(file, [Schema("texts", columns, "--column", headed=named)])[1]

    def _lines(self, file: File) -> Iterator[tuple[int, list[str]]]:
        """Plain text: an empty line is an empty text, so that rows stay aligned."""
        if self.column is not None:
            said = f'{file.name}: plain text has no column "{self.column}"'
            raise ValueError(f"{said}. Leave out --column, or give JSON lines.")
        if any(name != "text" for name in self.keep):
            given = listed(self.keep)
            raise ValueError(f'{file.name}: plain text has no columns to keep but "text" itself, not {given}.')
        return ((line, [text, *(text for _ in self.keep)]) for line, text in rows(file))


def chunk_end(row: int, smallest: int, largest: int) -> int:
    """The row at which the chunk ends that holds a row.

    The first eight chunks have ``smallest`` rows, and whenever there are twice as many rows in front of a chunk, chunks
    have twice as many, up to ``largest``. So little is lost where a run of few texts is killed, and a run of many has
    few chunks.
    """
    size = min(smallest, largest)
    while size < largest and row >= 8 * size:
        size = min(2 * size, largest)
    return (row // size + 1) * size


def _in_chunks(tables: Iterator[pa.Table], smallest: int, largest: int) -> Iterator[pa.Table]:
    """The same rows, a chunk in each table."""
    held: list[pa.Table] = []
    row, end = 0, chunk_end(0, smallest, largest)
    for table in tables:
        while row + len(table) >= end:
            yield pa.concat_tables([*held, table.slice(0, end - row)])
            held, table = [], table.slice(end - row)
            row, end = end, chunk_end(end, smallest, largest)
        held.append(table)
        row += len(table)
    if sum(map(len, held)):
        yield pa.concat_tables(held)


@contextmanager
def _unchanged(file: File, lines: Sequence[int], name: str) -> Iterator[None]:
    """Say which values no type holds."""
    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise ValueError(
            f'{file.name}, lines {lines[0]} to {lines[-1]}: no one type holds all values of "{name}" unchanged '
            f"({error}). Write them as strings, or do not keep the column."
        ) from None
