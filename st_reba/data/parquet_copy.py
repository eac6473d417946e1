"""Files of texts, of any kind and size, as one Parquet file whose row group i is chunk i.

To write it is to check every row; it is read in any order, a chunk at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from .columns import TEXTS
from .rows import BATCH, LONGEST, TOO_LONG, check_characters, kind_of, listed, parquet_batches, parquet_file, rows
from .sources import FORMATS, File

_TEXT = TEXTS.columns[0]
_TEXTS = pa.field("text", pa.large_string())


class Rows(NamedTuple):
    """Rows of a chunk: texts, and a table of what is kept of them."""

    texts: list[str]
    kept: pa.Table


class ParquetCopy:
    """A copy that :func:`write_copy` has written.

    Attributes:
        starts: The row at which each chunk begins, from 0, and the number of all rows.
    """

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path)
        groups = self._file.metadata
        self.starts = [0, *accumulate(groups.row_group(number).num_rows for number in range(groups.num_row_groups))]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, number: int) -> Rows:
        """The rows of one chunk."""
        table = self._file.read_row_group(number)
        # By their places: a kept column may be called as that of the texts.
        return Rows(table.column(0).to_pylist(), table.select(list(range(1, table.num_columns))))


def check_texts(files: Sequence[File], column: str | None, keep: Sequence[str]) -> None:
    """See that files can be read, and have the columns that are asked for, as far as their beginning tells.

    Args:
        files: Of one kind, in order: see :func:`st_reba.data.sources.files_of`.
        column: As for :func:`write_copy`.
        keep: As for :func:`write_copy`.

    Raises:
        ValueError: If one is no file, is of no known kind, or has no such columns.
    """
    for file in files:
        if not file.path.is_file():
            raise ValueError(
                f"{file.name} is a pipe or a device, but texts are read more than once: write them to a file."
            )
        if not file.kind:
            raise ValueError(f"{file.name}: of no known format. Give {FORMATS}.")
    if files[0].kind == "parquet":
        _parquet_columns(files[0], column, keep)
    else:
        next(_values(files[0], column, keep), None)


def write_copy(
    stream: IO[bytes],
    files: Sequence[File],
    column: str | None,
    keep: Sequence[str],
    chunk_size: int,
    smallest: int | None = None,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write the texts of files, which are read as one, and what is kept of them.

    Args:
        stream: Where to.
        files: Of one kind, in order.
        column: Where the texts are, in all but plain text; ``"text"`` if None, or one of the names that others use.
        keep: Columns to keep beside the texts; of plain text there is ``"text"`` alone. Those of Parquet have its
            types, cells are strings, and a column of JSON lines has the type that holds all of its values unchanged.
        chunk_size: Rows of a chunk.
        smallest: Rows of the first chunks, which grow to ``chunk_size``: see :func:`chunk_end`. None: all chunks are of
            one size.
        on_rows: Called with how many rows have been read.

    Raises:
        ValueError: If a row is no text, or has a kept value that cannot be written as it is, naming file and line; or
            if there is no row; or files differ in what they keep.
    """
    schema = pa.schema([_TEXTS, *_kept_schema(files, column, keep, on_rows)])
    tables = chain.from_iterable(_tables(file, column, keep, schema) for file in files)
    done = 0
    with pq.ParquetWriter(stream, schema, compression="zstd", use_compliant_nested_type=False) as writer:
        for table in _in_chunks(tables, smallest or chunk_size, chunk_size, on_rows):
            writer.write_table(table, row_group_size=len(table))
            done += len(table)
    if not done:
        raise ValueError(f"{files[0].name} holds no texts.")


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


def _in_chunks(
    tables: Iterator[pa.Table], smallest: int, largest: int, on_rows: Callable[[int], None]
) -> Iterator[pa.Table]:
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
        on_rows(row)
    if sum(map(len, held)):
        yield pa.concat_tables(held)


def _tables(file: File, column: str | None, keep: Sequence[str], schema: pa.Schema) -> Iterator[pa.Table]:
    """The texts of a file and what is kept, some rows at a time."""
    if file.kind == "parquet":
        yield from _parquet_tables(file, column, keep, schema)
        return
    for lines, (texts, *kept) in _batches(file, column, keep):
        columns = zip(schema, [texts, *kept], strict=True)
        arrays = [_array(file, lines, field.name, values, field.type) for field, values in columns]
        yield pa.table(arrays, schema=schema)


def _batches(file: File, column: str | None, keep: Sequence[str]) -> Iterator[tuple[list[int], list[list[Any]]]]:
    """Lines, and values by columns."""
    values = _values(file, column, keep)
    while batch := list(islice(values, BATCH)):
        lines, *columns = (list(each) for each in zip(*batch, strict=True))
        yield lines, columns


def _values(file: File, column: str | None, keep: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Line, text and kept values of each row of a file of lines."""
    read = {"txt": _plain_texts, "jsonl": _of_objects}.get(file.kind, _of_cells)
    return read(file, column, keep)


def _plain_texts(file: File, column: str | None, keep: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """An empty line is an empty text, so that rows stay aligned."""
    if column is not None:
        raise ValueError(f'{file.name}: plain text has no column "{column}". Leave out --column, or give JSON lines.')
    if any(name != "text" for name in keep):
        raise ValueError(f'{file.name}: plain text has no columns to keep but "text" itself, not {listed(keep)}.')
    for line, text in rows(file):
        yield (line, text, *(text for _ in keep))


def _of_cells(file: File, column: str | None, keep: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """TSV, or CSV, whose first row names the columns; or one column without a name, all texts."""
    content = rows(file)
    first = next(content, None)
    if first is None:
        return
    titles = [title.strip() for title in first[1]]
    name = column or _TEXT.find(titles)
    if name in titles:
        for each in (name, *keep):
            if titles.count(each) != 1:
                count = titles.count(each) or "no"
                raise ValueError(f'{file.name}, line 1: {count} columns are called "{each}", in {listed(titles)}.')
        places = [titles.index(each) for each in (name, *keep)]
    elif column is None and not keep and len(titles) == 1:
        content, places = chain([first], content), [0]
    else:
        raise ValueError(
            f'{file.name}, line 1: no "{column or "text"}", but {listed(titles)}. Name the text\'s column with '
            "--column."
        )
    for line, cells in content:
        if len(cells) != len(titles):
            raise ValueError(f"{file.name}, line {line}: {len(cells)} columns where {len(titles)} are expected.")
        yield (line, *(cells[place] for place in places))


def _of_objects(file: File, column: str | None, keep: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """JSON lines. The first one decides which column has the texts, where nobody has."""
    for line, content in rows(file):
        column = column or _TEXT.find(content) or "text"
        where = f"{file.name}, line {line}"
        if column not in content:
            raise ValueError(f'{where}: no "{column}", but {listed(content)}. Name the text\'s column with --column.')
        text = content[column]
        if not isinstance(text, str):
            raise ValueError(f'{where}: "{column}" is {kind_of(text)}, but a text is a string.')
        check_characters(text, f'{where}: "{column}"')
        yield (line, text, *(content.get(name) for name in keep))


def _parquet_columns(file: File, column: str | None, keep: Sequence[str]) -> tuple[str, pa.Schema]:
    """The column of texts, and the schema of those that are kept."""
    schema = parquet_file(file).schema_arrow
    name = column or _TEXT.find(schema.names) or "text"
    for each in (name, *keep):
        if each not in schema.names:
            raise ValueError(f'{file.name}: no column "{each}", but {listed(schema.names)}.')
        if (count := schema.names.count(each)) > 1:
            raise ValueError(f'{file.name}: {count} columns are called "{each}": give each a name of its own.')
    kind = schema.field(name).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(values) or pa.types.is_large_string(values) or pa.types.is_string_view(values)):
        raise ValueError(f'{file.name}: column "{name}" is {kind}, but texts are strings.')
    return name, pa.schema([schema.field(each) for each in keep])


def _parquet_tables(file: File, column: str | None, keep: Sequence[str], schema: pa.Schema) -> Iterator[pa.Table]:
    name, _ = _parquet_columns(file, column, keep)
    for done, batch in parquet_batches(file, list(dict.fromkeys((name, *keep)))):
        texts = batch.column(name)
        if texts.null_count:
            number = done + texts.is_null().index(True).as_py() + 1
            raise ValueError(f'{file.name}, row {number}: "{name}" is null, but a text is a string.')
        texts = texts.cast(_TEXTS.type)
        # Most batches are shorter than one text may be.
        if texts.nbytes > LONGEST and any(text.as_buffer().size > LONGEST for text in texts):
            raise ValueError(f'{file.name}, rows {done + 1} to {done + len(batch)}: a "{name}" that is {TOO_LONG}.')
        yield pa.table([texts, *(batch.column(each) for each in keep)], schema=schema)


def _kept_schema(
    files: Sequence[File], column: str | None, keep: Sequence[str], on_rows: Callable[[int], None]
) -> pa.Schema:
    """The types of what is kept, in all files."""
    of_parquet = [file for file in files if file.kind == "parquet"]
    schema = pa.schema([(name, pa.string()) for name in keep])
    if of_parquet:
        _, schema = _parquet_columns(of_parquet[0], column, keep)
        for file in of_parquet[1:]:
            for own, first in zip(_parquet_columns(file, column, keep)[1], schema, strict=True):
                if own.type != first.type:
                    raise ValueError(
                        f'{file.name}: column "{own.name}" is {own.type}, but {first.type} in {of_parquet[0].name}.'
                    )
    elif keep and any(file.kind == "jsonl" for file in files):
        schema = _schema_of_values(files, column, keep, on_rows)
    for field in schema:
        written = io.BytesIO()
        try:
            pq.write_table(pa.schema([field]).empty_table(), written)
            pq.read_table(written)
        except (pa.ArrowException, OSError) as error:
            said = f'Parquet cannot hold "{field.name}", {field.type}'
            raise ValueError(f"{files[0].name}: {said}: do not keep it ({error}).") from None
    return schema


def _schema_of_values(
    files: Sequence[File], column: str | None, keep: Sequence[str], on_rows: Callable[[int], None]
) -> pa.Schema:
    """The types that hold every value of JSON lines unchanged: no row is enough to tell them."""
    schema = pa.schema([(name, pa.null()) for name in keep])
    done = 0
    for file in files:
        for lines, (_, *columns) in _batches(file, column, keep):
            for field, values in zip(schema, columns, strict=True):
                own = pa.schema([field.with_type(_array(file, lines, field.name, values).type)])
                try:
                    schema = pa.unify_schemas([schema, own], promote_options="permissive")
                except pa.ArrowException:
                    raise _no_type(file, lines, field.name, f"{own.types[0]}, but {field.type} before") from None
            done += len(lines)
            on_rows(done)
    for field in schema:
        if pa.types.is_null(field.type):
            raise ValueError(f'{files[0].name}: "{field.name}" has no value in any row: do not keep it.')
    return schema


def _array(file: File, lines: Sequence[int], name: str, values: list[Any], kind: pa.DataType | None = None) -> pa.Array:
    """Values of a column as Arrow's, none of which is changed."""
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise _no_type(file, lines, name, str(error)) from None


def _no_type(file: File, lines: Sequence[int], name: str, said: str) -> ValueError:
    return ValueError(
        f'{file.name}, lines {lines[0]} to {lines[-1]}: no one type holds all values of "{name}" unchanged ({said}). '
        "Write them as strings, or do not keep the column."
    )
