"""Texts from files of any size, a chunk of rows at a time: what is too much for memory, and may be read in any order.

Longer than other files, because the kinds of files share one way to count, skip and resume.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from ..optional import require_pyarrow
from .columns import TEXTS
from .kept import Place, check_characters
from .records import LONGEST, TOO_LONG, kind_of, lines_of, listed, parquet_file, records
from .sources import FORMATS, File

_SKIPPED_BYTES = 1 << 20
_CHECKED_ROWS = 1 << 14
_TEXT = TEXTS.columns[0]


@dataclass(frozen=True)
class Piece:
    """Rows of one file that stand together.

    Attributes:
        file: Which file, from 0.
        row: Its first row in that file, from 0.
        rows: How many rows it has.
        line: The line of its first row, from 1.
        offset: The byte at which that line begins, after decompression.
    """

    file: int
    row: int
    rows: int
    line: int
    offset: int


@dataclass(frozen=True)
class Chunk:
    """Rows that are read, encoded and written as one.

    Attributes:
        number: Which chunk it is, from 0.
        row: Its first row, from 0, over all files.
        rows: How many rows it has.
        pieces: Where they are: a chunk that begins in one file may end in another.
    """

    number: int
    row: int
    rows: int
    pieces: tuple[Piece, ...]


class Index:
    """Where each chunk begins: 48 bytes a chunk, and as many a file, whatever the texts are.

    Args:
        pieces: int64, (pieces, 6): the chunk of each, and what :class:`Piece` says of it.
    """

    def __init__(self, pieces: np.ndarray) -> None:
        self._pieces = pieces
        # Rows before each piece, and the first piece of each chunk; with their ends.
        self._before = np.concatenate([[0], np.cumsum(pieces[:, 3])])
        chunks = int(pieces[-1, 0]) + 1 if len(pieces) else 0
        self._first = np.searchsorted(pieces[:, 0], np.arange(chunks + 1))

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, number: int) -> Chunk:
        first, end = int(self._first[number]), int(self._first[number + 1])
        pieces = tuple(Piece(*piece[1:]) for piece in self._pieces[first:end].tolist())
        return Chunk(number, int(self._before[first]), sum(piece.rows for piece in pieces), pieces)

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return int(self._before[-1])

    def save(self, stream: IO[bytes]) -> None:
        np.save(stream, self._pieces)

    @classmethod
    def load(cls, path: Path) -> Index:
        return cls(np.load(path))


@dataclass(frozen=True)
class Rows:
    """Texts, and the columns that are kept beside their vectors (lists, or Arrow columns), by name."""

    texts: list[str]
    kept: dict[str, Any] = field(default_factory=dict)


class Texts:
    """Files of texts that are read as one, in their order. :func:`open_texts` makes it.

    Reading goes forward cheaply; a jump ahead or back costs at most reading what lies between. No more than one file is
    open at a time.

    Attributes:
        files: What is read.
        column: Where the texts are.
        keep: Columns to read beside them.
    """

    def __init__(self, files: Sequence[File], column: str | None, keep: Sequence[str]) -> None:
        self.files = tuple(files)
        self.keep = tuple(keep)
        self._places = {name: Place(f'"{name}"') for name in self.keep}
        self._schema: Any = None
        self._asked = column
        self._open = 0, self._opened(0)
        self.column = self._open[1].column

    def index(
        self,
        chunk_size: int,
        on_rows: Callable[[int], None] = lambda rows: None,
        smallest: int | None = None,
    ) -> Index:
        """Read all files once, check every row, and note where each chunk begins.

        Args:
            chunk_size: Rows of a chunk.
            on_rows: Called with how many rows have been checked.
            smallest: Rows of the first chunks, which grow to ``chunk_size``: see :func:`chunk_end`. None: all chunks
                are of one size.

        Raises:
            ValueError: If a row is no text, or has a kept value that cannot be written as it is, naming file and line;
                or if there is no row; or files differ in what they keep.
        """
        pieces: list[tuple[int, ...]] = []
        chunk, chunk_ends, done = -1, 0, 0
        for number, file in enumerate(self.files):
            texts = self._file(number)
            rows, starts = texts.scan(
                partial(_end_in_file, done, smallest or chunk_size, chunk_size), partial(_told, on_rows, done)
            )
            for (row, line, offset), (end, *_) in pairwise([*starts, (rows, 0, 0)]):
                if done + row == chunk_ends:
                    chunk, chunk_ends = chunk + 1, chunk_end(chunk_ends, smallest or chunk_size, chunk_size)
                pieces.append((chunk, number, row, end - row, line, offset))
            done += rows
            if self.keep and file.kind == "parquet":
                self._note(file, texts.schema())
        if not done:
            raise ValueError(f"{self.files[0].name} holds no texts.")
        return Index(np.array(pieces, dtype=np.int64).reshape(-1, 6))

    def read(self, chunk: Chunk) -> Rows:
        """The rows of one chunk.

        Raises:
            ValueError: If a row is no text, or a file has changed since it was indexed.
        """
        parts = [self._file(piece.file).read(piece) for piece in chunk.pieces]
        if len(parts) == 1:
            return parts[0]
        return Rows(
            [text for part in parts for text in part.texts],
            {name: _joined([part.kept[name] for part in parts]) for name in self.keep},
        )

    def schema(self) -> Any:
        """The Arrow schema of the kept columns, which holds every value of theirs unchanged; after :meth:`index`.

        Raises:
            ValueError: If there is none.
        """
        return self._schema if self._schema is not None else self._file(0).schema()

    def _file(self, number: int) -> TextFile:
        if self._open[0] != number:
            self._open[1].close()
            self._open = number, self._opened(number)
        return self._open[1]

    def _opened(self, number: int) -> TextFile:
        file = self.files[number]
        if file.kind == "parquet":
            return ParquetFile(file, self._asked, self.keep)
        if file.kind == "jsonl":
            where = f" of {file.name}" if len(self.files) > 1 else ""
            return JsonLinesFile(file, self._asked, self.keep, self._places, where)
        return (PlainTextFile if file.kind == "txt" else CellsFile)(file, self._asked, self.keep)

    def _note(self, file: File, schema: Any) -> None:
        if self._schema is None:
            self._schema = schema
        for name in self.keep:
            own, first = (each.field(name).type for each in (schema, self._schema))
            if own != first:
                raise ValueError(f'{file.name}: column "{name}" is {own}, but {first} in {self.files[0].name}.')


class TextFile(ABC):
    """One file of texts."""

    def __init__(self, file: File, column: str, keep: Sequence[str]) -> None:
        self.file = file
        self.column = column
        self.keep = tuple(keep)

    @abstractmethod
    def scan(
        self, ends: Callable[[int], int], on_rows: Callable[[int], None]
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """Check every row: how many there are, and row, line and offset where a piece begins.

        Args:
            ends: The row at which the chunk ends that holds a row.
            on_rows: Called with how many have been checked.
        """

    @abstractmethod
    def read(self, piece: Piece) -> Rows:
        """The rows of one piece."""

    @abstractmethod
    def schema(self) -> Any:
        """The Arrow schema of the kept columns."""

    @abstractmethod
    def close(self) -> None:
        """Let the file go."""

    def _changed(self) -> ValueError:
        return ValueError(f"{self.file.name} is shorter than when it was first read: it was changed meanwhile.")

    def _strings(self) -> Any:
        arrow, _ = require_pyarrow("Keeping columns")
        return arrow.schema([(name, arrow.string()) for name in self.keep])


class LineFile(TextFile):
    """Rows that stand in lines, one after another."""

    #: Whether the first row holds the columns' names.
    headed = False

    def __init__(self, file: File, column: str, keep: Sequence[str]) -> None:
        super().__init__(file, column, keep)
        self._stream: BinaryIO | None = None
        self._position = 0

    @abstractmethod
    def _parse(self, content: Any) -> tuple[str, Sequence[Any]]:
        """A row's text and the values of its kept columns; a ValueError says what is wrong with it."""

    def _note(self, values: Sequence[Any], line: int) -> None:
        """Take in the kept values of a row, of which :meth:`schema` will tell; a ValueError says what is wrong."""

    def scan(
        self, ends: Callable[[int], int], on_rows: Callable[[int], None]
    ) -> tuple[int, list[tuple[int, int, int]]]:
        starts = array("q")
        row, border = 0, 0
        rows = self._records(1, 0)
        if self.headed:
            next(rows, None)
        for line, offset, content in rows:
            self._row(content, line, self._note if self.keep else None)
            if row == border:
                starts.extend((row, line, offset))
                border = ends(row)
            row += 1
            if row % _CHECKED_ROWS == 0:
                on_rows(row)
        return row, [(starts[i], starts[i + 1], starts[i + 2]) for i in range(0, len(starts), 3)]

    def read(self, piece: Piece) -> Rows:
        texts: list[str] = []
        kept: list[Sequence[Any]] = []
        for line, _, content in self._records(piece.line, piece.offset):
            text, values = self._row(content, line)
            texts.append(text)
            kept.append(values)
            if len(texts) == piece.rows:
                return Rows(texts, {name: [values[i] for values in kept] for i, name in enumerate(self.keep)})
        raise self._changed()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _row(
        self, content: Any, line: int, note: Callable[[Sequence[Any], int], None] | None = None
    ) -> tuple[str, Sequence[Any]]:
        try:
            text, values = self._parse(content)
            if note is not None:
                note(values, line)
            return text, values
        except ValueError as error:
            problem = str(error)
        raise ValueError(f"{self.file.name}, line {line}: {problem}")

    def _records(self, line: int, offset: int) -> Iterator[tuple[int, int, Any]]:
        try:
            yield from records(self.file, self._lines(line, offset), line, offset)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{self.file.name} cannot be read to its end ({error}).") from None

    def _lines(self, line: int, offset: int) -> Iterator[bytes]:
        for raw in lines_of(self.file, self._at(offset), line):
            self._position += len(raw)
            yield raw

    def _at(self, offset: int) -> BinaryIO:
        if self._stream is None or offset < self._position:
            self.close()
            self._stream, self._position = self.file.open(), 0
        if self._stream.seekable():
            self._stream.seek(offset)
        else:
            while self._position < offset:
                skipped = self._stream.read(min(offset - self._position, _SKIPPED_BYTES))
                if not skipped:
                    raise self._changed()
                self._position += len(skipped)
        self._position = offset
        return self._stream


class PlainTextFile(LineFile):
    """One text a line; an empty line is an empty text, so that rows stay aligned."""

    def __init__(self, file: File, column: str | None, keep: Sequence[str]) -> None:
        if column is not None:
            raise ValueError(
                f'{file.name}: plain text has no column "{column}". Leave out --column, or give JSON lines.'
            )
        if any(name != "text" for name in keep):
            raise ValueError(f'{file.name}: plain text has no columns to keep but "text" itself, not {listed(keep)}.')
        super().__init__(file, "text", keep)

    def _parse(self, content: Any) -> tuple[str, Sequence[Any]]:
        return content, (content,) * len(self.keep)

    def schema(self) -> Any:
        return self._strings()


class CellsFile(LineFile):
    """Rows of cells: TSV, or CSV, whose first row names the columns; or one column without a name, all texts."""

    def __init__(self, file: File, column: str | None, keep: Sequence[str]) -> None:
        super().__init__(file, column or "text", keep)
        _, _, header = next(self._records(1, 0), (1, 0, []))
        self._count = len(header)
        titles = [title.strip() for title in header]
        found = _TEXT.find(titles) if column is None else column if column in titles else None
        self.headed = found is not None
        if found is None:
            if column is not None or keep or len(header) > 1:
                raise ValueError(
                    f'{file.name}, line 1: no "{self.column}", but {listed(titles)}. Name the text\'s column with '
                    "--column."
                )
            self._text, self._kept = 0, []
            return
        self.column = found
        for name in (found, *keep):
            if titles.count(name) != 1:
                count = titles.count(name) or "no"
                raise ValueError(f'{file.name}, line 1: {count} columns are called "{name}", in {listed(titles)}.')
        self._text = titles.index(found)
        self._kept = [titles.index(name) for name in keep]

    def _parse(self, content: Any) -> tuple[str, Sequence[Any]]:
        if len(content) != self._count:
            raise ValueError(f"{len(content)} columns where {self._count} are expected.")
        return content[self._text], [content[index] for index in self._kept]

    def schema(self) -> Any:
        return self._strings()


class JsonLinesFile(LineFile):
    """One JSON object a line; lines of white space alone are passed over.

    Args:
        file: What is read.
        column: Where the texts are.
        keep: What is kept.
        places: The types of what is kept, found from the lines of all files.
        where: What stands behind a line's number, where there are several files.
    """

    def __init__(
        self, file: File, column: str | None, keep: Sequence[str], places: dict[str, Place], where: str = ""
    ) -> None:
        super().__init__(file, column or "text", keep)
        self._places = places
        self._where = where
        if column is None:
            # What is wrong with the first line is told when every line is checked.
            try:
                _, _, first = next(self._records(1, 0), (1, 0, {}))
            except ValueError:
                return
            self.column = _TEXT.find(first) or "text"

    def _note(self, values: Sequence[Any], line: int) -> None:
        for place, value in zip(self._places.values(), values, strict=True):
            place.add(value, f"{line}{self._where}" if self._where else line)

    def schema(self) -> Any:
        arrow, _ = require_pyarrow("Keeping columns")
        types = {}
        for name, place in self._places.items():
            try:
                types[name] = place.arrow_type()
            except ValueError as error:
                raise ValueError(f"{self.file.name}: {error}") from None
            if arrow.types.is_null(types[name]):
                raise ValueError(f'{self.file.name}: "{name}" has no value in any row: do not keep it.')
        return arrow.schema(list(types.items()))

    def _parse(self, content: Any) -> tuple[str, Sequence[Any]]:
        if self.column not in content:
            raise ValueError(f'no "{self.column}", but {listed(content)}. Name the text\'s column with --column.')
        text = content[self.column]
        if not isinstance(text, str):
            raise ValueError(f'"{self.column}" is {kind_of(text)}, but a text is a string.')
        check_characters(text, f'"{self.column}"')
        return text, [content.get(name) for name in self.keep]


class ParquetFile(TextFile):
    """A column of strings in a Parquet file."""

    def __init__(self, file: File, column: str | None, keep: Sequence[str]) -> None:
        self._arrow, _ = require_pyarrow("Parquet")
        self._file = parquet_file(file)
        schema = self._file.schema_arrow
        super().__init__(file, column or _TEXT.find(schema.names) or "text", keep)
        for name in (self.column, *keep):
            if name not in schema.names:
                raise ValueError(f'{file.name}: no column "{name}", but {listed(schema.names)}.')
            if (count := schema.names.count(name)) > 1:
                raise ValueError(f'{file.name}: {count} columns are called "{name}": give each a name of its own.')
        kind = schema.field(self.column).type
        if not self._is_text(kind):
            raise ValueError(f'{file.name}: column "{self.column}" is {kind}, but texts are strings.')
        counts = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._groups = [0, *accumulate(counts)][:-1]
        self._batches: Iterator[Any] = iter(())
        self._pending: Any = None
        self._position = self._file.metadata.num_rows + 1

    def _is_text(self, kind: Any) -> bool:
        types = self._arrow.types
        if types.is_dictionary(kind):
            kind = kind.value_type
        return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))

    @property
    def _columns(self) -> list[str]:
        return list(dict.fromkeys((self.column, *self.keep)))

    def close(self) -> None:
        self._file.close()

    def schema(self) -> Any:
        return self._arrow.schema([self._file.schema_arrow.field(name) for name in self.keep])

    def scan(
        self, ends: Callable[[int], int], on_rows: Callable[[int], None]
    ) -> tuple[int, list[tuple[int, int, int]]]:
        row = 0
        for batch in self._read_batches(range(len(self._groups))):
            self._check(batch.column(self.column), row)
            row += len(batch)
            on_rows(row)
        starts, start = [], 0
        while start < row:
            starts.append((start, start + 1, 0))
            start = ends(start)
        return row, starts

    def _check(self, texts: Any, row: int) -> None:
        if texts.null_count:
            number = row + texts.is_null().index(True).as_py() + 1
            raise ValueError(f'{self.file.name}, row {number}: "{self.column}" is null, but a text is a string.')
        where = f"{self.file.name}, rows {row + 1} to {row + len(texts)}"
        try:
            texts.validate(full=True)
        except self._arrow.ArrowInvalid as error:
            raise ValueError(f'{where}: "{self.column}" is not UTF-8 ({error}).') from None
        values = texts.dictionary if self._arrow.types.is_dictionary(texts.type) else texts
        # Most batches are shorter than one text may be.
        if values.nbytes > LONGEST and any(value.as_buffer().size > LONGEST for value in values if value.is_valid):
            raise ValueError(f'{where}: a "{self.column}" that is {TOO_LONG}.')

    def read(self, piece: Piece) -> Rows:
        table = self._arrow.Table.from_batches(list(self._take(piece.row, piece.rows)))
        return Rows(table.column(self.column).to_pylist(), {name: table.column(name) for name in self.keep})

    def _take(self, row: int, rows: int) -> Iterator[Any]:
        self._go_to(row)
        while rows:
            if not self._pending:
                self._pending = next(self._batches, None)
                if self._pending is None:
                    raise self._changed()
            skipped = min(row - self._position, len(self._pending))
            piece = self._pending.slice(skipped, rows)
            used = skipped + len(piece)
            self._pending = self._pending.slice(used)
            self._position += used
            row += len(piece)
            rows -= len(piece)
            if len(piece):
                yield piece

    def _read_batches(self, groups: Sequence[int]) -> Iterator[Any]:
        try:
            yield from self._file.iter_batches(batch_size=_CHECKED_ROWS, row_groups=list(groups), columns=self._columns)
        except (self._arrow.ArrowException, OSError) as error:
            raise ValueError(f"{self.file.name} cannot be read to its end ({error}).") from None

    def _go_to(self, row: int) -> None:
        """Begin at the row group of ``row``, unless going on from here is as near."""
        group = bisect_right(self._groups, row) - 1
        if self._position <= row and self._groups[group] <= self._position:
            return
        self._batches = self._read_batches(range(group, len(self._groups)))
        self._pending = None
        self._position = self._groups[group]


def open_texts(files: Sequence[File], column: str | None = None, keep: Sequence[str] = ()) -> Texts:
    """Open files of texts, which are read as one.

    Args:
        files: Of one kind, in order: see :func:`st_reba.data.sources.files_of`.
        column: Where the texts are, in all but plain text; ``"text"`` if None, or one of the names that others use.
        keep: Columns to read beside the texts; of plain text there is ``"text"`` alone.

    Raises:
        ValueError: If one is no file, is of no known kind, or has no such columns.
        ImportError: If a package is missing that reads it.
    """
    for file in files:
        if not file.path.is_file():
            raise ValueError(
                f"{file.name} is a pipe or a device, but texts are read more than once: write them to a file."
            )
        if not file.kind:
            raise ValueError(f"{file.name}: of no known format. Give {FORMATS}.")
    return Texts(files, column, keep)


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


def _end_in_file(before: int, smallest: int, largest: int, row: int) -> int:
    return chunk_end(before + row, smallest, largest) - before


def _told(on_rows: Callable[[int], None], before: int, rows: int) -> None:
    on_rows(before + rows)


def _joined(columns: Sequence[Any]) -> Any:
    """Columns of several files as one: lists, or Arrow's."""
    if isinstance(columns[0], list):
        return [value for column in columns for value in column]
    arrow, _ = require_pyarrow("Parquet")
    return arrow.chunked_array([chunk for column in columns for chunk in column.chunks])
