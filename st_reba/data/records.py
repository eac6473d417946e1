"""What stands in a file of rows, one after another, each with its place."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from ..optional import require_pyarrow
from .kept import NotANumber
from .sources import File

#: ``(line, offset, content)``: the line where a record begins, from 1, the byte at which that line does, after
#: decompression, and what it holds: a text, the cells of a row, or an object.
Record = tuple[int, int, Any]

#: Bytes that a line, a row of CSV or a text in Parquet may have: no model reads a text of so many, and memory must hold
#: any one of them.
LONGEST = 1 << 25
TOO_LONG = f"longer than {LONGEST >> 20} MiB. Cut it into several texts"
_BATCH = 1 << 12


def lines_of(file: File, stream: BinaryIO, line: int = 1) -> Iterator[bytes]:
    """The lines of a stream, with their ends.

    Args:
        file: What is read.
        stream: Its bytes, from the beginning of a line on.
        line: The number of that line.

    Raises:
        ValueError: If a line is longer than :data:`LONGEST`, before all of it is in memory.
    """
    while raw := stream.readline(LONGEST + 1):
        if len(raw) > LONGEST:
            raise ValueError(f"{file.name}, line {line}: {TOO_LONG}.")
        yield raw
        line += 1


def records(file: File, lines: Iterable[bytes], line: int = 1, offset: int = 0) -> Iterator[Record]:
    """The records of a text file, from a line on.

    A line is a record, but for CSV, where a quoted cell may run over several. Of plain text every line is one;
    elsewhere those of white space alone are passed over.

    Args:
        file: Says what it is: see :attr:`File.kind`.
        lines: Its lines, with their ends.
        line: The number of the first of these.
        offset: The byte at which it begins.

    Yields:
        Of plain text the line; of TSV and CSV the list of cells; of JSON lines the object.

    Raises:
        ValueError: If a line is not UTF-8, or no row, naming file and line.
    """
    if file.kind == "csv":
        yield from _csv_records(file, lines, line, offset)
        return
    for raw in lines:
        if file.kind == "txt" or not raw.isspace():
            text = _decoded(file, raw, line).removesuffix("\n").removesuffix("\r")
            if file.kind == "txt":
                yield line, offset, text
            elif file.kind == "tsv":
                yield line, offset, text.split("\t")
            else:
                yield line, offset, _object(file, text, line)
        line += 1
        offset += len(raw)


def rows(file: File, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """The rows of a whole file, Parquet or text, and the line (of Parquet the row) of each, from 1.

    Args:
        file: What is read.
        columns: Of Parquet, what is read of it; all if None.

    Raises:
        ValueError: If it cannot be read, naming file and line.
    """
    if file.kind == "parquet":
        yield from _parquet_rows(file, columns)
        return
    try:
        with file.open() as stream:
            for line, _, content in records(file, lines_of(file, stream)):
                yield line, content
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{file.name} cannot be read to its end ({error}).") from None


def parquet_file(file: File) -> Any:
    """``pyarrow.parquet.ParquetFile``.

    Raises:
        ValueError: If it is none.
        ImportError: If pyarrow is missing.
    """
    arrow, parquet = require_pyarrow("Parquet")
    try:
        found = parquet.ParquetFile(file.path)
        _ = found.schema_arrow.names  # Decoded only now.
        return found
    except arrow.ArrowException as error:
        raise ValueError(f"{file.name} is not a Parquet file ({error}).") from None
    except (OSError, UnicodeDecodeError) as error:
        # The system's own errors name the file; those of Arrow have no number.
        if getattr(error, "errno", None) is not None:
            raise
        raise ValueError(f"{file.name} is a damaged Parquet file ({error}).") from None


def _parquet_rows(file: File, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    arrow, _ = require_pyarrow("Parquet")
    number = 0
    try:
        for batch in parquet_file(file).iter_batches(batch_size=_BATCH, columns=columns):
            for row in batch.to_pylist():
                number += 1
                if any(isinstance(value, str) and len(value) > LONGEST for value in row.values()):
                    raise ValueError(f"{file.name}, row {number}: a text that is {TOO_LONG}.")
                yield number, row
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file.name} cannot be read to its end ({error}).") from None


def _csv_records(file: File, lines: Iterable[bytes], line: int, offset: int) -> Iterator[Record]:
    at = [line, offset]

    def feed() -> Iterator[str]:
        for raw in lines:
            text = _decoded(file, raw, at[0])
            at[0] += 1
            at[1] += len(raw)
            if at[1] - begins[1] > LONGEST:
                raise ValueError(
                    f"{file.name}, line {begins[0]}: a row that is {TOO_LONG}; or a quotation mark may be missing."
                )
            yield text

    # A document in a cell is longer than what csv allows by itself.
    csv.field_size_limit(LONGEST)
    reader = csv.reader(feed(), strict=True)
    begins = tuple(at)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield begins[0], begins[1], cells
            begins = tuple(at)
    except csv.Error as error:
        raise ValueError(f"{file.name}, line {begins[0]}: {error}. A quotation mark may be missing.") from None


def _decoded(file: File, raw: bytes, line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name}, line {line}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from None


def _object(file: File, text: str, line: int) -> dict[str, Any]:
    try:
        found = _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name}, line {line}: not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file.name}, line {line}: {kind_of(found)}, but a line is a JSON object.")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{listed(sorted({name for name in names if names.count(name) > 1}))} more than once")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_once, parse_constant=NotANumber)


def kind_of(value: object) -> str:
    """What a value of JSON is, in words."""
    names = {"dict": "an object", "list": "a list", "str": "a string", "bool": "true or false", "NoneType": "null"}
    return names.get(type(value).__name__, "a number")


def listed(names: Iterable[str] | Sequence[str]) -> str:
    """Names in quotes."""
    return ", ".join(f'"{name}"' for name in names) or "nothing"
