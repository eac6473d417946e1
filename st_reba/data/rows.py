"""The rows of a file, one after another, each with its line."""

from __future__ import annotations

import csv
import json
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .sources import File

#: Bytes that a line, a row of CSV or a text in Parquet may have: no model reads a text of so many, and memory must hold
#: any one of them.
LONGEST = 1 << 25
TOO_LONG = f"longer than {LONGEST >> 20} MiB. Cut it into several texts"
#: Rows of Parquet that are read at once.
BATCH = 1 << 10
#: The standard library has one limit of a cell's length for the whole process.
_CSV_LIMIT = threading.Lock()


def rows(file: File, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """The rows of a file, and the line of each (of Parquet the row), from 1.

    A line is a row, but for CSV, where a quoted cell may run over several: the first of these is named. Of plain text
    every line is one; elsewhere those of white space alone are passed over.

    Args:
        file: Says what it is: see :attr:`File.kind`.
        columns: Of Parquet, what is read of it; all if None.

    Yields:
        Of plain text the line; of TSV and CSV the list of cells; of JSON lines and Parquet the object.

    Raises:
        ValueError: If a line is not UTF-8, or no row, naming file and line; or the file cannot be read to its end.
    """
    if file.kind == "parquet":
        for before, batch in parquet_batches(file, columns):
            for number, row in enumerate(batch.to_pylist(), before + 1):
                if any(isinstance(value, str) and len(value) > LONGEST for value in row.values()):
                    raise ValueError(f"{file.name}, row {number}: a text that is {TOO_LONG}.")
                yield number, row
    elif file.kind == "csv":
        yield from _csv_rows(file)
    else:
        for line, raw in _lines(file):
            text = _decoded(file, line, raw).removesuffix("\n").removesuffix("\r")
            if file.kind == "txt":
                yield line, text
            elif text and not text.isspace():
                yield line, text.split("\t") if file.kind == "tsv" else _object(file, line, text)


def parquet_file(file: File) -> pq.ParquetFile:
    """A Parquet file, opened.

    Raises:
        ValueError: If it is none.
    """
    try:
        found = pq.ParquetFile(file.path)
        _ = found.schema_arrow.names  # Decoded only now.
        return found
    except pa.ArrowException as error:
        raise ValueError(f"{file.name} is not a Parquet file ({error}).") from None
    except (OSError, UnicodeDecodeError) as error:
        # The system's own errors name the file; those of Arrow have no number.
        if getattr(error, "errno", None) is not None:
            raise
        raise ValueError(f"{file.name} is a damaged Parquet file ({error}).") from None


def parquet_batches(file: File, columns: Sequence[str] | None) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Rows of a Parquet file, some at a time, and how many stand before them.

    Raises:
        ValueError: If it cannot be read, or holds text that is not UTF-8.
    """
    done = 0
    try:
        for batch in parquet_file(file).iter_batches(batch_size=BATCH, columns=columns):
            batch.validate(full=True)
            yield done, batch
            done += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file.name} cannot be read to its end: in or after row {done + 1}, {error}.") from None


def _lines(file: File) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line, with its end; of one that is too long no more is read than a line may have."""
    with file.open() as stream:
        for line in count(1):
            try:
                raw = stream.readline(LONGEST + 1)
            except (OSError, pa.ArrowException) as error:
                raise ValueError(f"{file.name} cannot be read to its end ({error}).") from None
            if not raw:
                return
            if len(raw) > LONGEST:
                raise ValueError(f"{file.name}, line {line}: {TOO_LONG}.")
            yield line, raw


def _decoded(file: File, line: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name}, line {line}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from None


def _csv_rows(file: File) -> Iterator[tuple[int, list[str]]]:
    size = 0

    def feed() -> Iterator[str]:
        nonlocal size
        for line, raw in _lines(file):
            size += len(raw)
            if size > LONGEST:
                raise ValueError(
                    f"{file.name}, line {first}: a row that is {TOO_LONG}; or a quotation mark may be missing."
                )
            yield _decoded(file, line, raw)

    reader = csv.reader(feed(), strict=True)
    while True:
        first, size = reader.line_num + 1, 0
        # A document in a cell is longer than what the process may allow, and what it allows is not ours to change.
        with _CSV_LIMIT:
            allowed = csv.field_size_limit(LONGEST)
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"{file.name}, line {first}: {error}. A quotation mark may be missing.") from None
            finally:
                csv.field_size_limit(allowed)
        if cells is None:
            return
        if any(cell.strip() for cell in cells):
            yield first, cells


def _object(file: File, line: int, text: str) -> dict[str, Any]:
    try:
        found = _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name}, line {line}: not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file.name}, line {line}: {text[:20]} is JSON, but a line is a JSON object.")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{listed(sorted({name for name in names if names.count(name) > 1}))} more than once")
    return found


def _decimal(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits} is a number beyond the range of a 64-bit float")
    return number


_JSON = json.JSONDecoder(object_pairs_hook=_once, parse_float=_decimal)


def listed(names: Iterable[str]) -> str:
    """Names in quotes."""
    return ", ".join(f'"{name}"' for name in names) or "nothing"


def check_characters(text: str, name: str) -> None:
    """Refuse what is no text.

    Raises:
        ValueError: If there is half of a surrogate pair in it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half of a surrogate pair, which is no character.") from None
