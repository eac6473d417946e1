"""Files of a user's data: a file, a folder of shards, a remote path, or a data set of the Hub."""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import pyarrow

from ..files import is_full
from ..optional import require

#: Kinds of content by suffix.
KINDS = {f".{kind}": kind for kind in ("txt", "tsv", "csv", "jsonl", "parquet")}
KINDS |= dict.fromkeys((".ndjson", ".json"), "jsonl")
#: Compressions of text files by their last suffix; all but xz as pyarrow names them.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
FORMATS = (
    "plain text (.txt, one text a line), .tsv, .csv, JSON lines (.jsonl, .ndjson) or Parquet (.parquet); all but the "
    "last also compressed (.gz, .bz2, .xz, .zst)"
)
_SHEET = "Save a sheet as .csv, in UTF-8."
#: What begins with some bytes, and what to do about it.
_SIGNATURES = {
    b"PK\x03\x04": f"an Excel workbook or another ZIP file. {_SHEET}",
    b"\xd0\xcf\x11\xe0": f"an Excel workbook. {_SHEET}",
    b"PAR1": "a Parquet file. End its name in .parquet.",
}
for _end, _head in zip(COMPRESSIONS, (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"), strict=True):
    _SIGNATURES[_head] = f"compressed. End its name so, as in table.csv{_end}."
#: Words that file names have for splits: of train, test and validation.
_SPLIT = re.compile(r"(?:^|[^a-z])(?:(train)(?:ing)?|(test)(?:ing)?|dev|val(?:id(?:ation)?)?)(?=$|[^a-z])")
#: Order of preference among the parts of a data set, where none is asked for: to measure on, and to train on.
TO_MEASURE = ("test", "validation", "train")
TO_TRAIN = ("train",)
#: To read all that there is: a folder as a whole; of the splits of a data set one has to be named.
ALL: tuple[str, ...] = ()

# A web server's answers where there is no such file, or no longer.
_NOT_THERE = (404, 410)
# No backslash: C:\data\pairs is a path of Windows.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:/\\]*){0,2}")


def kind_of(name: str) -> tuple[str, str]:
    """Return the kind and the compression that the end of a file name tells; the kind is empty if it tells none."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = suffixes.pop() if suffixes[-1:] and suffixes[-1] in COMPRESSIONS else ""
    kind = KINDS.get(suffixes[-1], "") if suffixes else ""
    return "" if kind == "parquet" and compression else kind, compression


def foreign(head: bytes) -> str:
    """Return what a file is that is no text in UTF-8, as its first line tells, and what to do; empty: nothing tells."""
    told = (what for signature, what in _SIGNATURES.items() if head.startswith(signature))
    utf_16 = b"\0" in head or head.startswith((b"\xff\xfe", b"\xfe\xff"))
    return next(told, "UTF-16. Save the file as UTF-8." if utf_16 else "")


def native_file(path: Path) -> pyarrow.OSFile:
    """Open a file of this machine, whose name Arrow encodes only if it is UTF-8."""
    return pyarrow.OSFile(os.fsencode(path))


class File:
    """A file on this machine.

    Args:
        path: Path of the file.
        name: Name in messages; the path if empty.

    Attributes:
        kind: ``"txt"``, ``"tsv"``, ``"csv"``, ``"jsonl"`` or ``"parquet"``, by its suffix.
        separator: What separates its columns; None: what is usual.

    Raises:
        ValueError: If it can be read only once, or is of no known kind.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self.path, self.name = path, name or str(path)
        self.kind, self._compression = kind_of(path.name)
        self.separator: str | None = None
        if path.exists() and not path.is_file():
            raise ValueError(
                f"{self.name} is a pipe or a device, but texts are read more than once: write them to a file."
            )
        if not self.kind:
            with path.open("rb") as stream:
                what = foreign(stream.read(8))
            raise ValueError(f"{self.name} is {what}" if what else f"{self.name}: of no known format. Give {FORMATS}.")

    def separate(self, separator: str | None) -> None:
        """Set what separates its columns: one character, ``"tab"`` or ``"comma"``; None: what is usual.

        Raises:
            ValueError: If it is none, or the file has no separators.
        """
        self.separator = {"tab": "\t", "\\t": "\t", "comma": ","}.get(str(separator), separator)
        usable = self.kind in ("csv", "tsv") and re.fullmatch(r'[^"\r\n]', self.separator or "")
        if separator is not None and not usable:
            raise ValueError(f"{self.name}: --separator {separator!r} is for .csv and .tsv: one character, or tab.")

    def open(self) -> BinaryIO:
        """Open it to read its bytes after decompression."""
        if self._compression == ".xz":
            return cast(BinaryIO, lzma.open(self.path))
        stream = pyarrow.input_stream(native_file(self.path), compression=COMPRESSIONS.get(self._compression))
        return cast(BinaryIO, io.BufferedReader(stream))


def is_remote(source: str | Path) -> bool:
    """Whether fsspec is to find it: ``s3://``, ``hf://``, ``gs://``, ``https://`` ..."""
    return "://" in str(source)


def files_of(source: str | Path, splits: Sequence[str], scratch: Path) -> list[File]:
    """Return the files that a name stands for, in the order of their names, in which numbers count as numbers.

    Args:
        source: A file; a folder, of which the files of a known kind are shards of one table; a pattern such as
            ``"data/train-*.parquet"``; a path that fsspec knows, to any of these; or a data set that
            ``datasets.load_dataset`` knows, ``NAME``, ``NAME:SUBSET`` or ``NAME:SUBSET:SPLIT``.
        splits: Order of preference among splits, where there are several and none is named; a folder in which only
            some names have a split's word is refused. :data:`ALL`: a folder is read as a whole.
        scratch: Folder for copies of files that are not on this machine. A copy of an earlier call is used again if the
            file has not changed.

    Raises:
        FileNotFoundError: If there is nothing of that name.
        ValueError: If a folder holds no table, or more than one; or a file is of no known kind.
        OSError: If a remote path cannot be read.
        ImportError: If a package is missing that reads it.
    """
    here = files_here(source, splits)
    if here is not None:
        return here
    name = str(source)
    return _fetched(name, splits, scratch) if is_remote(name) else [_of_the_hub(name, splits, scratch)]


def files_here(source: str | Path, splits: Sequence[str]) -> list[File] | None:
    """Return the files that a name stands for; None if they are not on this machine, and to be copied to it.

    Args and errors as for :func:`files_of`.
    """
    name = str(source)
    path = Path(name)
    if is_remote(name):
        return None
    if path.is_dir():
        paths = [path / each for each in _shards(name, [each.name for each in path.iterdir()], splits)]
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
    return [File(each) for each in paths]


def _of_the_hub(name: str, splits: Sequence[str], scratch: Path) -> File:
    """Load a data set of the Hub as a Parquet file."""
    title, subset, split, *_ = [*name.split(":"), "", ""]
    path = scratch / "rows.parquet"
    try:
        datasets = require("datasets", "data", f"{name}: there is no such file or folder; a data set of the Hub")
        found = datasets.load_dataset(title, subset or None, split=split or None)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} is no file or folder, and datasets cannot load it either: {' '.join(str(error).split())}"
        ) from None
    if not split:
        split = next((each for each in splits if each in found), next(iter(found)) if len(found) == 1 else "")
        if not split:
            raise ValueError(f"{name} has the splits {', '.join(found)}: name one, {title}:{subset}:SPLIT.")
        found = found[split]
    scratch.mkdir(parents=True, exist_ok=True)
    found.to_parquet(path)
    return File(path, f"{title}{f', {subset}' if subset else ''}, split {split}")


def _fetched(name: str, splits: Sequence[str], scratch: Path) -> list[File]:
    """Copy the files of a remote path."""
    core = require("fsspec.core", "data", "A remote path")
    inside: dict[str, str] = {}
    with asking(name):
        filesystem, path = core.url_to_fs(name)
        paths = [path]
        if has_magic(path):
            paths = sorted(filesystem.glob(path), key=_natural)
            if not paths:
                raise FileNotFoundError(path)
        # To ask for a folder where a suffix tells a file would be to list it, which not every server can.
        elif not kind_of(_file_name(path))[0] and filesystem.isdir(path):
            inside = {_file_name(each): each for each in filesystem.ls(path, detail=False)}
            paths = []
    paths = paths or [inside[each] for each in _shards(name, list(inside), splits)]
    with asking(name):
        # A folder of its own for each, so that it keeps its name, by whose end it is read.
        places = [scratch / f"{number:06}" / _file_name(each) for number, each in enumerate(paths)]
        names = [name if each == path else str(filesystem.unstrip_protocol(each)) for each in paths]
        # A file system's checksum differs for a file that was written in a file's place.
        wanted = json.dumps([[each, filesystem.checksum(each)] for each in paths])
        copied = scratch / "copied.json"
        if not (copied.is_file() and copied.read_text("utf-8") == wanted):
            shutil.rmtree(scratch, ignore_errors=True)
            for each, place in zip(paths, places, strict=True):
                place.parent.mkdir(parents=True)
                filesystem.get_file(each, str(place))
            # Last: if it is there, all are whole.
            copied.write_text(wanted, "utf-8")
    return [File(place, shown) for place, shown in zip(places, names, strict=True)]


@contextmanager
def asking(name: str, to_write: bool = False) -> Iterator[None]:
    """Raise errors of a file system as a sentence: each has types of its own."""
    try:
        yield
    except ImportError as error:
        # fsspec names the package, and its cause the module that it could not import.
        missing = getattr(error.__cause__, "name", None)
        more = f": pip install {missing}" if missing else ""
        raise ImportError(f"{name}: fsspec cannot use it here ({str(error).strip()}){more}.") from None
    except Exception as error:
        if is_full(error):
            raise
        # Over http, fsspec calls every failure a missing file: a refused connection, a timeout, a wrong password.
        reason = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        said = str(reason).strip() or type(reason).__name__
        if to_write:
            kept = "What is done is kept on this machine, and the same command goes on"
            raise OSError(f"{name} cannot be written ({said}). {kept}.") from error
        if isinstance(reason, FileNotFoundError) or getattr(reason, "status", None) in _NOT_THERE:
            raise FileNotFoundError(f"{name}: there is no such file. Check the name.") from None
        raise OSError(f"{name} cannot be read ({said}).") from error


def _file_name(path: str) -> str:
    """Return the last part of a path or an address, without what is asked of a server behind it."""
    return re.sub(r"[?#].*", "", path).rstrip("/").rpartition("/")[2]


def _shards(name: str, inside: Sequence[str], splits: Sequence[str]) -> list[str]:
    """Return the names of the files in a folder that are one table, in order."""
    seen = [each for each in inside if not each.startswith((".", "_"))]
    tables = sorted((each for each in seen if kind_of(each)[0]), key=_natural)
    # JSON next to shards holds what is known about them.
    tables = [each for each in tables if not each.lower().endswith(".json")] or tables
    if not tables:
        there = ", ".join(sorted(seen)[:5]) or "nothing"
        raise ValueError(
            f"{name} is a directory without a table in it ({there}): give a file, or a folder of {FORMATS}."
        )
    of_split: dict[str, list[str]] = {}
    for each in tables:
        words = _SPLIT.findall(each.lower())
        of_split.setdefault("".join(words[-1]) or "validation" if words else "", []).append(each)
    if splits and len(of_split) > 1:
        asked = next((each for each in splits if each in of_split), "")
        # Where some names have no split's word, the others may have one by chance.
        if not asked or "" in of_split:
            parts = ", ".join(f"{each or 'none in the name'} ({names[0]})" for each, names in of_split.items())
            raise ValueError(
                f'{name} holds files of several splits, {parts}: give a pattern, such as "{name}/*train*".'
            )
        tables = of_split[asked]
    if len(kinds := sorted({kind_of(each)[0] for each in tables})) > 1:
        raise ValueError(f"{name} holds files of several kinds, {', '.join(kinds)}: give one file, or a pattern.")
    return tables


def _natural(path: object) -> list[tuple[int, str]]:
    """Return a key by which 10 comes after 9."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in parts]
