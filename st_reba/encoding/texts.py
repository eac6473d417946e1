"""Texts from a file of any size: plain text, JSON lines or Parquet, a chunk of rows at a time.

Longer than other files, because the kinds of files share one way to count, skip and resume.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ..files import check_file
from ..optional import require_pyarrow
from .kept import NotANumber, Place, check_characters

_SKIPPED_BYTES = 1 << 20
_CHECKED_ROWS = 1 << 14
_FORMATS = (
    "plain text (.txt, one text a line), JSON lines (.jsonl, .ndjson) or Parquet (.parquet); "
    "the first two also compressed (.gz, .zst)"
)


@dataclass(frozen=True)
class Chunk:
    """Rows that are read, encoded and written as one.

    Attributes:
        number: Which chunk it is, from 0.
        row: Its first row, from 0.
        rows: How many rows it has.
        line: The line of its first row, from 1.
        offset: The byte at which that line begins, after decompression.
    """

    number: int
    row: int
    rows: int
    line: int
    offset: int


class Index:
    """Where each chunk of a file begins: 24 bytes a chunk, whatever the texts are.

    Args:
        starts: int64, (chunks + 1, 3): row, line and offset of each chunk's beginning and of the end.
    """

    def __init__(self, starts: np.ndarray) -> None:
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Chunk:
        row, line, offset = self._starts[number].tolist()
        return Chunk(number, row, int(self._starts[number + 1, 0]) - row, line, offset)

    @property
    def rows(self) -> int:
        """Rows of the whole file."""
        return int(self._starts[-1, 0])

    def save(self, stream: BinaryIO) -> None:
        np.save(stream, self._starts)

    @classmethod
    def load(cls, path: Path) -> Index:
        return cls(np.load(path))


@dataclass(frozen=True)
class Rows:
    """Texts, and the columns that are kept beside their vectors (lists, or Arrow columns), by name."""

    texts: list[str]
    kept: dict[str, Any] = field(default_factory=dict)


class TextFile(ABC):
    """A file of texts. :func:`open_texts` makes the right kind.

    Reading goes forward cheaply; a jump ahead or back costs at most reading what lies between.
    """

    def __init__(self, path: Path, column: str, keep: Sequence[str]) -> None:
        self.path = path
        self.column = column
        self.keep = tuple(keep)

    @abstractmethod
    def index(self, chunk_size: int, on_rows: Callable[[int], None] = lambda rows: None) -> Index:
        """Read the whole file once, check every row, and note where each ``chunk_size`` rows begin.

        Raises:
            ValueError: If a row is no text, or has a kept value that cannot be written as it is, naming file and line;
                or if there is no row.
        """

    @abstractmethod
    def read(self, chunk: Chunk) -> Rows:
        """The rows of one chunk.

        Raises:
            ValueError: If a row is no text, or the file has changed since it was indexed.
        """

    @abstractmethod
    def schema(self) -> Any:
        """The Arrow schema of the kept columns, which holds every value of theirs unchanged; after :meth:`index`.

        Raises:
            ValueError: If there is none.
        """

    def _whole(self, index: Index) -> Index:
        if index.rows == 0:
            raise ValueError(f"{self.path} holds no texts.")
        return index

    def _changed(self) -> ValueError:
        return ValueError(f"{self.path} is shorter than when it was first read: it was changed meanwhile.")


class LineFile(TextFile):
    """One row a line."""

    def __init__(self, path: Path, column: str, keep: Sequence[str]) -> None:
        super().__init__(path, column, keep)
        self._stream: BinaryIO | None = None
        self._position = 0

    @abstractmethod
    def _parse(self, line: str) -> tuple[str, Sequence[Any]]:
        """A line's text and the values of its kept columns; a ValueError says what is wrong with it."""

    def _is_row(self, raw: bytes) -> bool:
        return True

    def _note(self, values: Sequence[Any], line: int) -> None:
        """Take in the kept values of a row, of which :meth:`schema` will tell; a ValueError says what is wrong."""

    def index(self, chunk_size: int, on_rows: Callable[[int], None] = lambda rows: None) -> Index:
        starts = array("q")
        row, line, offset = 0, 1, 0
        note = self._note if self.keep else None
        for raw in self._lines(0):
            if self._is_row(raw):
                self._row(raw, line, note)
                if row % chunk_size == 0:
                    starts.extend((row, line, offset))
                row += 1
                if row % _CHECKED_ROWS == 0:
                    on_rows(row)
            line += 1
            offset += len(raw)
        starts.extend((row, line, offset))
        return self._whole(Index(np.array(starts, dtype=np.int64).reshape(-1, 3)))

    def read(self, chunk: Chunk) -> Rows:
        texts: list[str] = []
        kept: list[Sequence[Any]] = []
        line = chunk.line
        for raw in self._lines(chunk.offset):
            if self._is_row(raw):
                text, values = self._row(raw, line)
                texts.append(text)
                kept.append(values)
            line += 1
            if len(texts) == chunk.rows:
                return Rows(texts, {name: [values[i] for values in kept] for i, name in enumerate(self.keep)})
        raise self._changed()

    def _row(
        self, raw: bytes, line: int, note: Callable[[Sequence[Any], int], None] | None = None
    ) -> tuple[str, Sequence[Any]]:
        try:
            decoded = raw.decode("utf-8-sig" if line == 1 else "utf-8")
            text, values = self._parse(decoded.removesuffix("\n").removesuffix("\r"))
            if note is not None:
                note(values, line)
            return text, values
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 ({error.reason}). Save the file as UTF-8."
        except ValueError as error:
            problem = str(error)
        raise ValueError(f"{self.path}, line {line}: {problem}")

    def _lines(self, offset: int) -> Iterator[bytes]:
        try:
            stream = self._at(offset)
            for raw in stream:
                self._position += len(raw)
                yield raw
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{self.path} cannot be read to its end ({error}).") from None

    def _at(self, offset: int) -> BinaryIO:
        if self._stream is None or offset < self._position:
            self._stream, self._position = _open(self.path), 0
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

    def _parse(self, line: str) -> tuple[str, Sequence[Any]]:
        return line, (line,) * len(self.keep)

    def schema(self) -> Any:
        arrow, _ = require_pyarrow("Keeping columns")
        return arrow.schema([(name, arrow.string()) for name in self.keep])


class JsonLinesFile(LineFile):
    """One JSON object a line; lines of white space alone are passed over."""

    def __init__(self, path: Path, column: str, keep: Sequence[str]) -> None:
        super().__init__(path, column, keep)
        self._places = [Place(f'"{name}"') for name in self.keep]

    def _note(self, values: Sequence[Any], line: int) -> None:
        for place, value in zip(self._places, values, strict=True):
            place.add(value, line)

    def schema(self) -> Any:
        arrow, _ = require_pyarrow("Keeping columns")
        types = {}
        for name, place in zip(self.keep, self._places, strict=True):
            try:
                types[name] = place.arrow_type()
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from None
            if arrow.types.is_null(types[name]):
                raise ValueError(f'{self.path}: "{name}" has no value in any row: do not keep it.')
        return arrow.schema(list(types.items()))

    def _is_row(self, raw: bytes) -> bool:
        return not raw.isspace()

    def _parse(self, line: str) -> tuple[str, Sequence[Any]]:
        try:
            record = _JSON.decode(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error}).") from None
        if not isinstance(record, dict):
            raise ValueError(f"{_kind(record)}, but a line is a JSON object.")
        if self.column not in record:
            raise ValueError(f'no "{self.column}", but {_listed(record)}. Name the text\'s column with --column.')
        text = record[self.column]
        if not isinstance(text, str):
            raise ValueError(f'"{self.column}" is {_kind(text)}, but a text is a string.')
        check_characters(text, f'"{self.column}"')
        return text, [record.get(name) for name in self.keep]


class ParquetFile(TextFile):
    """A column of strings in a Parquet file."""

    def __init__(self, path: Path, column: str, keep: Sequence[str]) -> None:
        super().__init__(path, column, keep)
        self._arrow, parquet = require_pyarrow("Parquet")
        try:
            self._file = parquet.ParquetFile(path)
        except self._arrow.ArrowException as error:
            raise ValueError(f"{path} is not a Parquet file ({error}).") from None
        schema = self._file.schema_arrow
        for name in (column, *keep):
            if name not in schema.names:
                raise ValueError(f'{path}: no column "{name}", but {_listed(schema.names)}.')
            if (count := schema.names.count(name)) > 1:
                raise ValueError(f'{path}: {count} columns are called "{name}": give each a name of its own.')
        kind = schema.field(column).type
        if not self._is_text(kind):
            raise ValueError(f'{path}: column "{column}" is {kind}, but texts are strings.')
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

    def schema(self) -> Any:
        return self._arrow.schema([self._file.schema_arrow.field(name) for name in self.keep])

    def index(self, chunk_size: int, on_rows: Callable[[int], None] = lambda rows: None) -> Index:
        row = 0
        for batch in self._read_batches(range(len(self._groups))):
            self._check(batch.column(self.column), row)
            row += len(batch)
            on_rows(row)
        rows = np.array([*range(0, row, chunk_size), row], dtype=np.int64)
        return self._whole(Index(np.stack([rows, rows + 1, np.zeros_like(rows)], axis=1)))

    def _check(self, texts: Any, row: int) -> None:
        if texts.null_count:
            number = row + texts.is_null().index(True).as_py() + 1
            raise ValueError(f'{self.path}, row {number}: "{self.column}" is null, but a text is a string.')
        try:
            texts.validate(full=True)
        except self._arrow.ArrowInvalid as error:
            where = f"{self.path}, rows {row + 1} to {row + len(texts)}"
            raise ValueError(f'{where}: "{self.column}" is not UTF-8 ({error}).') from None

    def read(self, chunk: Chunk) -> Rows:
        table = self._arrow.Table.from_batches(list(self._take(chunk.row, chunk.rows)))
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
            raise ValueError(f"{self.path} cannot be read to its end ({error}).") from None

    def _go_to(self, row: int) -> None:
        """Begin at the row group of ``row``, unless going on from here is as near."""
        group = bisect_right(self._groups, row) - 1
        if self._position <= row and self._groups[group] <= self._position:
            return
        self._batches = self._read_batches(range(group, len(self._groups)))
        self._pending = None
        self._position = self._groups[group]


def open_texts(path: str | Path, column: str | None = None, keep: Sequence[str] = ()) -> TextFile:
    """Open a file of texts by its suffix.

    Args:
        path: Plain text, JSON lines or Parquet; the first two also compressed (.gz, .zst).
        column: Where the texts are in JSON lines or Parquet; ``"text"`` if None.
        keep: Columns to read beside the texts; of plain text there is ``"text"`` alone.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no file, its suffix is unknown, or it has no such columns.
    """
    path = Path(path).absolute()
    check_file(path)
    if not path.is_file():
        raise ValueError(f"{path} is a pipe or a device, but texts are read more than once: write them to a file.")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = suffixes[-1:] in (["." + name] for name in ("gz", "zst"))
    kind = "".join(suffixes[-2:-1] if compressed else suffixes[-1:])
    if kind in (".jsonl", ".ndjson"):
        return JsonLinesFile(path, column or "text", keep)
    if kind == ".parquet" and not compressed:
        return ParquetFile(path, column or "text", keep)
    if kind != ".txt":
        raise ValueError(f"{path}: of no known format. Give {_FORMATS}.")
    if column is not None:
        raise ValueError(f'{path}: plain text has no column "{column}". Leave out --column, or give JSON lines.')
    if any(name != "text" for name in keep):
        raise ValueError(f'{path}: plain text has no columns to keep but "text" itself, not {_listed(keep)}.')
    return PlainTextFile(path, "text", keep)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{_listed(sorted({name for name in names if names.count(name) > 1}))} more than once")
    return record


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_constant=NotANumber)


def _open(path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if suffix == ".zst":
        pyarrow, _ = require_pyarrow("Reading .zst")
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _kind(value: object) -> str:
    names = {"dict": "an object", "list": "a list", "str": "a string", "bool": "true or false", "NoneType": "null"}
    return names.get(type(value).__name__, "a number")


def _listed(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names) or "nothing"
