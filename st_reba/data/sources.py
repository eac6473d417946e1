"""Sources of data: a file, a folder of shards, a remote path, or a data set of the Hub; and the rows of their files."""

from __future__ import annotations

import csv
import io
import json
import lzma
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from itertools import chain, count, islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq

from ..files import is_full
from ..optional import require

#: Kinds of content by suffix.
KINDS = {f".{kind}": kind for kind in ("txt", "tsv", "csv", "jsonl", "parquet")}
KINDS |= dict.fromkeys((".ndjson", ".json"), "jsonl")
#: Compressions of text files by their last suffix, with pyarrow's names for all but xz.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
FORMATS = (
    "plain text (.txt, one text a line), .tsv, .csv, JSON lines (.jsonl, .ndjson) or Parquet (.parquet); all but the "
    "last also compressed (.gz, .bz2, .xz, .zst)"
)
_SHEET = "Save a sheet as .csv, in UTF-8."
#: Formats that are not read, by their first bytes, each with a remedy.
_SIGNATURES = {
    b"PK\x03\x04": f"an Excel workbook or another ZIP file. {_SHEET}",
    b"\xd0\xcf\x11\xe0": f"an Excel workbook. {_SHEET}",
    b"PAR1": "a Parquet file. End its name in .parquet.",
}
for _end, _head in zip(COMPRESSIONS, (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"), strict=True):
    _SIGNATURES[_head] = f"compressed. End its name so, as in table.csv{_end}."
#: Words for splits in file names: train, test and validation.
_SPLIT = re.compile(r"(?:^|[^a-z])(?:(train)(?:ing)?|(test)(?:ing)?|dev|val(?:id(?:ation)?)?)(?=$|[^a-z])")
#: Default splits in order of preference, for measuring and for training.
TO_MEASURE = ("test", "validation", "train")
TO_TRAIN = ("train",)
#: No preference: a folder is read as a whole, and a data set with several splits needs a named one.
ALL: tuple[str, ...] = ()

# HTTP statuses of missing files.
_NOT_FOUND = (404, 410)
# Without backslashes, which are in paths of Windows such as C:\data\pairs.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:/\\]*){0,2}")

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


def kind_of(name: str) -> tuple[str, str]:
    """Return the kind and the compression of a file by its suffixes, or an empty kind if they are unknown."""
    path = PurePosixPath(name.lower())
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    kind = KINDS.get(PurePosixPath(path.stem).suffix if compression else path.suffix, "")
    return "" if kind == "parquet" and compression else kind, compression


def foreign(head: bytes) -> str:
    """Return the format and the remedy for a file whose first bytes are not UTF-8 text, or an empty string."""
    formats = (name for signature, name in _SIGNATURES.items() if head.startswith(signature))
    utf_16 = b"\0" in head or head.startswith((b"\xff\xfe", b"\xfe\xff"))
    return next(formats, "UTF-16. Save the file as UTF-8." if utf_16 else "")


def native_file(path: Path) -> pa.OSFile:
    """Open a local file in Arrow, also if its name is not UTF-8."""
    return pa.OSFile(os.fsencode(path))


class File:
    """File on this machine.

    Args:
        path: Path of the file.
        name: Name in messages. Defaults to the path.

    Attributes:
        kind: Kind by suffix: ``"txt"``, ``"tsv"``, ``"csv"``, ``"jsonl"`` or ``"parquet"``.
        separator: Separator of the columns. None detects a comma or a tab.
        unit: Noun for the numbers of its rows: ``"line"``, or ``"row"`` in Parquet and JSON arrays.

    Raises:
        ValueError: If the file can be read only once, or has an unknown format.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self.path, self.name = path, name or str(path)
        self.kind, self._compression = kind_of(path.name)
        self.separator: str | None = None
        self.unit = "row" if self.kind == "parquet" else "line"
        if path.exists() and not path.is_file():
            raise ValueError(f"{self.name} is a pipe or a device, which cannot be read twice: write it to a file.")
        if not self.kind:
            with path.open("rb") as stream:
                known = foreign(stream.read(8))
            raise ValueError(f"{self.name} {f'is {known}' if known else f'has an unknown format. Give {FORMATS}.'}")

    def separate(self, separator: str | None) -> None:
        """Set the separator of the columns: one character, ``"tab"``, ``"comma"``, or None to detect it.

        Raises:
            ValueError: If the separator is invalid, or the file is neither TSV nor CSV.
        """
        self.separator = {"tab": "\t", "\\t": "\t", "comma": ","}.get(str(separator), separator)
        usable = self.kind in ("csv", "tsv") and re.fullmatch(r'[^"\r\n]', self.separator or "")
        if separator is not None and not usable:
            raise ValueError(f"{self.name}: --separator {separator!r} is for .csv and .tsv: one character, or tab.")

    def open(self) -> BinaryIO:
        """Open the file to read its decompressed bytes."""
        if self._compression == ".xz":
            return cast(BinaryIO, lzma.open(self.path))
        stream = pa.input_stream(native_file(self.path), compression=COMPRESSIONS.get(self._compression))
        return cast(BinaryIO, io.BufferedReader(stream))


def is_remote(source: str | Path) -> bool:
    """Whether a source is a URL for fsspec: ``s3://``, ``hf://``, ``gs://``, ``https://`` ..."""
    return "://" in str(source)


def files_of(source: str | Path, splits: Sequence[str], scratch: Path) -> list[File]:
    """Return the files of a source, sorted by name, with numbers in names sorted by value.

    Args:
        source: Path of a file; of a folder, whose files of a known kind are shards of one table; a pattern such as
            ``"data/train-*.parquet"``; a URL for fsspec of any of these; or a data set for ``datasets.load_dataset``:
            ``NAME``, ``NAME:SUBSET`` or ``NAME:SUBSET:SPLIT``.
        splits: Splits in order of preference, for sources with several. A folder in which only some names contain a
            word for a split is refused. :data:`ALL` reads a folder as a whole.
        scratch: Folder for copies of remote files. A copy of an earlier call is reused if the file is unchanged.

    Raises:
        FileNotFoundError: If the source does not exist.
        ValueError: If a folder holds no table or more than one, or a file has an unknown format.
        OSError: If a remote path cannot be read.
        ImportError: If a package is missing that reads the source.
    """
    files = files_here(source, splits)
    if files is not None:
        return files
    name = str(source)
    return _fetch(name, splits, scratch) if is_remote(name) else [_from_hub(name, splits, scratch)]


def files_here(source: str | Path, splits: Sequence[str]) -> list[File] | None:
    """Return the files of a source on this machine, or None if the source is remote.

    Arguments and errors are those of :func:`files_of`.
    """
    name = str(source)
    path = Path(name)
    if is_remote(name):
        return None
    if path.is_dir():
        paths = [path / shard for shard in _shards(name, [entry.name for entry in path.iterdir()], splits)]
    elif path.exists():
        paths = [path]
    elif has_magic(name):
        paths = sorted(map(Path, glob(name)), key=_natural)
        if not paths:
            raise FileNotFoundError(f"{name}: no file has such a name.")
    elif any(kind_of(path.name)) or not _HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"{name}: there is no such file. Check the name.")
    else:
        return None
    return [File(path) for path in paths]


def _from_hub(name: str, splits: Sequence[str], scratch: Path) -> File:
    """Write a data set of the Hub to a Parquet file."""
    title, subset, split, *_ = [*name.split(":"), "", ""]
    path = scratch / "rows.parquet"
    try:
        datasets = require("datasets", "data", f"{name}: there is no such file or folder; a data set of the Hub")
        data = datasets.load_dataset(title, subset or None, split=split or None)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} is not a file or folder, and datasets cannot load it: {' '.join(str(error).split())}"
        ) from None
    if not split:
        split = next((name for name in splits if name in data), next(iter(data)) if len(data) == 1 else "")
        if not split:
            raise ValueError(f"{name} has the splits {', '.join(data)}: give one, as in {title}:{subset}:SPLIT.")
        data = data[split]
    scratch.mkdir(parents=True, exist_ok=True)
    data.to_parquet(path)
    return File(path, f"{title}{f', {subset}' if subset else ''}, split {split}")


def _fetch(name: str, splits: Sequence[str], scratch: Path) -> list[File]:
    """Copy the files of a remote path."""
    core = require("fsspec.core", "data", "A remote path")
    inside: dict[str, str] = {}
    with file_system_errors(name):
        filesystem, path = core.url_to_fs(name)
        paths = [path]
        if has_magic(path):
            paths = sorted(filesystem.glob(path), key=_natural)
            if not paths:
                raise FileNotFoundError(path)
        # Not with a suffix of a file: some servers cannot list a folder, which isdir does.
        elif not kind_of(_file_name(path))[0] and filesystem.isdir(path):
            inside = {_file_name(entry): entry for entry in filesystem.ls(path, detail=False)}
            paths = []
    paths = paths or [inside[shard] for shard in _shards(name, list(inside), splits)]
    with file_system_errors(name):
        # In separate folders, so that files keep their names and suffixes.
        copies = [scratch / f"{number:06}" / _file_name(remote) for number, remote in enumerate(paths)]
        names = [name if remote == path else str(filesystem.unstrip_protocol(remote)) for remote in paths]
        # The checksum of a file system changes when a file is replaced.
        checksums = json.dumps([[remote, filesystem.checksum(remote)] for remote in paths])
        copied = scratch / "copied.json"
        if not (copied.is_file() and copied.read_text("utf-8") == checksums):
            shutil.rmtree(scratch, ignore_errors=True)
            for remote, copy in zip(paths, copies, strict=True):
                copy.parent.mkdir(parents=True)
                filesystem.get_file(remote, str(copy))
            # Written last, as a mark that all copies are complete.
            copied.write_text(checksums, "utf-8")
    return [File(copy, remote) for copy, remote in zip(copies, names, strict=True)]


@contextmanager
def file_system_errors(name: str, to_write: bool = False) -> Iterator[None]:
    """Raise the errors of file systems, which have types of their own, as OSError or ImportError with one message."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{name}: {str(error).strip()}.") from None
    except Exception as error:
        if is_full(error):
            raise
        # Over http, fsspec raises FileNotFoundError also for a refused connection, a timeout or a wrong password.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        reason = str(cause).strip() or type(cause).__name__
        if to_write:
            remedy = "Finished work is kept on this machine: run the same command again to resume"
            raise OSError(f"{name} cannot be written ({reason}). {remedy}.") from error
        if isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) in _NOT_FOUND:
            raise FileNotFoundError(f"{name}: there is no such file. Check the name.") from None
        raise OSError(f"{name} cannot be read ({reason}).") from error


def _file_name(path: str) -> str:
    """Return the last part of a path or a URL, without its query."""
    return re.sub(r"[?#].*", "", path).rstrip("/").rpartition("/")[2]


def _shards(name: str, inside: Sequence[str], splits: Sequence[str]) -> list[str]:
    """Return the names of the files in a folder that are shards of one table, in order."""
    visible = [file for file in inside if not file.startswith((".", "_"))]
    tables = sorted((file for file in visible if kind_of(file)[0]), key=_natural)
    # JSON next to other shards holds metadata.
    tables = [file for file in tables if not file.lower().endswith(".json")] or tables
    if not tables:
        content = ", ".join(sorted(visible)[:5]) or "nothing"
        raise ValueError(
            f"{name} is a directory without a table in it ({content}): give a file, or a folder of {FORMATS}."
        )
    by_split: dict[str, list[str]] = {}
    for file in tables:
        words = _SPLIT.findall(file.lower())
        split = ("".join(words[-1]) or "validation") if words else ""
        by_split.setdefault(split, []).append(file)
    if splits and len(by_split) > 1:
        preferred = next((split for split in splits if split in by_split), "")
        # If some names have no word for a split, the others may have one by chance.
        if not preferred or "" in by_split:
            parts = ", ".join(f"{split or 'none in the name'} ({files[0]})" for split, files in by_split.items())
            raise ValueError(
                f'{name} holds files of several splits, {parts}: give a pattern, such as "{name}/*train*".'
            )
        tables = by_split[preferred]
    if len(kinds := sorted({kind_of(file)[0] for file in tables})) > 1:
        raise ValueError(f"{name} holds files of several kinds, {', '.join(kinds)}: give one file, or a pattern.")
    return tables


def _natural(path: object) -> list[tuple[int, str]]:
    """Return a sorting key by which 10 comes after 9."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in parts]


# Rows


def read_rows(file: File, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file, each after its line (in Parquet and JSON arrays, its row), from 1.

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
    elif file.kind == "jsonl":
        for line, row in _objects(file):
            if not isinstance(row, dict):
                raise ValueError(f"{place(file, line)}: {str(row)[:20]} is JSON, but a row is a JSON object.")
            yield line, row
    else:
        for line, text in _lines(file):
            yield line, text.removesuffix("\n").removesuffix("\r")


def place(file: File, line: int) -> str:
    """Return the name of a line of a file, or of a row of Parquet or of a JSON array, for messages."""
    return f"{file.name}, {file.unit} {line}"


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
    quoting: Literal[0, 3] = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    reader, first = csv.reader((text for _, text in lines), delimiter=separator, quoting=quoting, strict=True), 1
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


def _objects(file: File) -> Iterator[tuple[int, Any]]:
    """Yield the values of JSON lines, or those of a file that is one array."""
    lines, first = _lines(file), True
    for line, text in lines:
        if text.isspace():
            continue
        if first and text.lstrip().startswith("["):
            text = "\n" * (line - 1) + text
            for _, more in lines:
                text += more
                if len(text) > LONGEST_ARRAY:
                    raise ValueError(f"{file.name}: an array of more than {LONGEST_ARRAY >> 20} MiB. Give JSON lines.")
            values = _json(file, 1, text)
            file.unit = "row"
            yield from enumerate(values, 1)
        else:
            yield line, _json(file, line, text)
        first = False


def _json(file: File, line: int, text: str) -> Any:
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        if line == 1 and text.startswith("{") and not text.rstrip().endswith("}"):
            raise ValueError(f"{file.name} is one JSON document. Give an array of objects, or JSON lines.") from None
        raise ValueError(f"{place(file, line)}: not JSON ({error}).") from None


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


_JSON = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_float=_decimal)


def listed(names: Iterable[str]) -> str:
    """Return names in quotes, separated by commas."""
    return ", ".join(f'"{name}"' for name in names) or "nothing"


def check_characters(text: str, name: str) -> None:
    """Check that a text is not too long, and consists of characters.

    Raises:
        ValueError: If the text is longer than :data:`LONGEST`, or holds half of a surrogate pair.
    """
    if len(text) > LONGEST:
        raise ValueError(TOO_LONG)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half of a surrogate pair, which is not a character.") from None
