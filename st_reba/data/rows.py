"""Rows of a file, each with its line."""

from __future__ import annotations

import csv
import json
import lzma
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .sources import File, foreign, native_file

#: Limit in bytes of a line, a row of CSV or a text in Parquet, each of which must fit into memory.
LONGEST = 1 << 25
TOO_LONG = f"longer than {LONGEST >> 20} MiB. Cut it into several texts"
#: Limit in characters of a file that is one JSON array, which is read as a whole.
LONGEST_ARRAY = 8 * LONGEST
#: Rows read at once.
BATCH = 1 << 10

_NO_SEPARATORS = re.compile(r'(?m)(?:^|(?<=[\t;|,]))"[^"]*(?:""[^"]*)*"|(?<=\d),(?=\d)')

# The default limit of the csv module is too low for documents in cells.
csv.field_size_limit(max(csv.field_size_limit(), LONGEST))


def read_rows(file: File, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file, each after its line (in Parquet, its row), from 1.

    A row is a line, except in CSV, where a quoted cell may span several lines, and the first is given. Blank lines are
    rows of plain text, and skipped in other files.

    Args:
        file: File to read.
        columns: Columns of a Parquet file to read. None reads all.

    Yields:
        The line of plain text, the list of cells of TSV and CSV, or the object of JSON lines and Parquet.

    Raises:
        ValueError: If a line is not UTF-8 or not a row, or the file is damaged. The message names file and line.
    """
    if file.kind == "parquet":
        for before, batch in parquet_batches(file, columns):
            yield from enumerate(batch.to_pylist(), before + 1)
    elif file.kind in ("csv", "tsv"):
        yield from _cells(file)
    else:
        lines, first = _lines(file), True
        for line, text in lines:
            text = text.removesuffix("\n").removesuffix("\r")
            if file.kind == "txt":
                yield line, text
            elif text and not text.isspace():
                if first and text.lstrip().startswith("["):
                    yield from _array(file, "\n" * (line - 1) + text, lines)
                else:
                    yield line, _object(file, line, text)[0]
                first = False


def place(file: File, line: int) -> str:
    """Return the name of a line of a file, or of a row of Parquet, for messages."""
    return f"{file.name}, {'row' if file.kind == 'parquet' else 'line'} {line}"


def parquet_schema(file: File) -> pa.Schema:
    """Return the names and types of the columns of a Parquet file.

    Raises:
        ValueError: If the file is not a Parquet file.
    """
    try:
        schema = pq.ParquetFile(native_file(file.path)).schema_arrow
        _ = schema.names  # Names are decoded on access.
        return schema
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        # Errors of the system, which have a number, name the file themselves.
        if getattr(error, "errno", None) is not None:
            raise
        raise ValueError(f"{file.name} is not a Parquet file, or a damaged one ({error}).") from None


def parquet_batches(file: File, columns: Sequence[str] | None) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield batches of rows of a Parquet file, each after the number of preceding rows.

    Raises:
        ValueError: If the file cannot be read, or holds text that is not UTF-8.
    """
    done = 0
    try:
        for batch in pq.ParquetFile(native_file(file.path)).iter_batches(batch_size=BATCH, columns=columns):
            batch.validate(full=True)
            yield done, batch
            done += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file.name} cannot be read to its end: in or after row {done + 1}, {error}.") from None


def _lines(file: File) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line, including its line end."""
    with file.open() as stream:
        for line in count(1):
            try:
                raw = stream.readline(LONGEST + 1)
                if len(raw) > LONGEST:
                    raise ValueError(f"{place(file, line)}: {TOO_LONG}.")
                if line == 1 and (format_and_remedy := foreign(raw)):
                    raise ValueError(f"{file.name} is {format_and_remedy}")
                text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{place(file, line)}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from None
            except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
                raise ValueError(f"{file.name} cannot be read to its end ({error}).") from None
            if not raw:
                return
            yield line, text


def _cells(file: File) -> Iterator[tuple[int, list[str]]]:
    lines = _lines(file)
    sample = list(islice(lines, BATCH))
    separator = file.separator or _separator(file, "".join(text for _, text in sample))
    lines = chain(sample, lines)
    if separator == "\t":
        for line, text in lines:
            if text.strip():
                yield line, text.removesuffix("\n").removesuffix("\r").split("\t")
        return
    first = 1
    reader = csv.reader((text for _, text in lines), delimiter=separator, strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield first, cells
            first = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{place(file, first)}: {error}. A quotation mark may be missing.") from None


def _separator(file: File, sample: str) -> str:
    """Return the separator of a file's columns, a comma or a tab.

    Raises:
        ValueError: If another separator is likely.
    """
    usual = "\t" if file.kind == "tsv" else ","
    # Quoted separators and decimal commas do not count.
    lines = [line for line in _NO_SEPARATORS.sub("", sample).split("\n") if line.strip()]
    counts = {mark: {line.count(mark) for line in lines} for mark in "\t;|,"}
    steady = min(counts[usual]) if len(counts[usual]) == 1 else 0
    if lines and min(counts["\t"]) > steady:
        return "\t"
    if steady:
        return usual
    for mark, per_line in counts.items():
        # In a file of few lines, each may contain one by chance.
        if len(per_line) == 1 < len(lines) and min(per_line) >= (2 if mark == "," or len(lines) < 10 else 1):
            remedy = f'Give --separator "{mark}", or save it with {"tabs" if usual != "," else "commas"}'
            raise ValueError(f'{file.name}: columns are separated by "{mark}". {remedy}.')
    return usual


def _array(file: File, text: str, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file that is one array, each after the line where it begins."""
    text += "\n"
    for _, more in lines:
        text += more
        if len(text) > LONGEST_ARRAY:
            raise ValueError(f"{file.name}: an array of more than {LONGEST_ARRAY >> 20} MiB. Give JSON lines.")
    mark, at, line = re.match(r"\s*\[\s*(\]\s*\Z)?", text), 0, 1
    while mark and "]" not in mark[0]:
        line, at = line + text.count("\n", at, mark.end()), mark.end()
        row, end = _object(file, line, text, at)
        yield line, row
        mark = _AFTER_OBJECT.match(text, end)
    if mark is None:
        raise ValueError(f"{place(file, line)}: not JSON (no comma or ] after an object, or text after the array).")


def _object(file: File, line: int, text: str, at: int | None = None) -> tuple[dict[str, Any], int]:
    """Return the object in a text, or the one that begins at a character, and where it ends."""
    try:
        row, end = (_JSON.decode(text), len(text)) if at is None else _JSON.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        if line == 1 and at is None and text.startswith("{") and not text.rstrip().endswith("}"):
            raise ValueError(f"{file.name} is one JSON document. Give an array of objects, or JSON lines.") from None
        raise ValueError(f"{place(file, line)}: not JSON ({error}).") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place(file, line)}: {str(row)[:20]} is JSON, but a row is a JSON object.")
    return row, end


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{listed(sorted({name for name in names if names.count(name) > 1}))} more than once")
    return row


def _decimal(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits} is a number beyond the range of a 64-bit float")
    return number


_AFTER_OBJECT = re.compile(r"\s*(,|\]\s*\Z)\s*")
_JSON = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_float=_decimal)


def listed(names: Iterable[str]) -> str:
    """Return names in quotes, separated by commas."""
    return ", ".join(f'"{name}"' for name in names) or "nothing"


def check_characters(text: str, name: str) -> None:
    """Check that a text consists of characters.

    Raises:
        ValueError: If the text holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half of a surrogate pair, which is not a character.") from None
