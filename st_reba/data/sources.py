"""What a user names as data: a file, a folder of shards, a remote path, or a data set of the Hub. All become files."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import pyarrow

from ..files import atomic_file, is_full
from ..optional import require

#: What a suffix says about the content.
KINDS = {f".{kind}": kind for kind in ("txt", "tsv", "csv", "jsonl", "parquet")} | {
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
#: What a text file may be compressed with, by its last suffix, and what pyarrow calls that.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
FORMATS = (
    "plain text (.txt, one text a line), .tsv, .csv, JSON lines (.jsonl, .ndjson) or Parquet (.parquet); all but the "
    "last also compressed (.gz, .zst)"
)
#: What file names call each split.
_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("dev", "val", "valid", "validation"),
}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words}
_SPLIT = re.compile(rf"(?:^|[^a-z])({'|'.join(_SPLIT_OF)})(?=$|[^a-z])")
#: Which part is read of a data set that has several, where none is asked for: to measure on, and to train on.
TO_MEASURE = ("test", "validation", "train")
TO_TRAIN = ("train",)
#: To read all that there is: no split is taken by itself, so that of several one has to be named.
ALL: tuple[str, ...] = ()

# What a web server answers where there is no such file, or no longer.
_NOT_THERE = (404, 410)
# No backslash: C:\data\pairs is a path of Windows.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:/\\]*){0,2}")


@dataclass(frozen=True)
class File:
    """A file on this machine.

    Attributes:
        path: Where it lies.
        name: What messages call it: as the user does.
        kind: ``"txt"``, ``"tsv"``, ``"csv"``, ``"jsonl"`` or ``"parquet"``, by its suffix; empty: of no known one.
        compression: ``".gz"`` or ``".zst"``; empty: none.
    """

    path: Path
    name: str
    kind: str
    compression: str = ""

    @classmethod
    def of(cls, path: Path, name: str = "") -> File:
        suffixes = [suffix.lower() for suffix in path.suffixes]
        compression = suffixes.pop() if suffixes[-1:] and suffixes[-1] in COMPRESSIONS else ""
        kind = KINDS.get(suffixes[-1], "") if suffixes else ""
        return cls(path, name or str(path), "" if kind == "parquet" and compression else kind, compression)

    def open(self) -> BinaryIO:
        """Its bytes, after decompression."""
        stream = pyarrow.input_stream(str(self.path), compression=COMPRESSIONS.get(self.compression))
        return cast(BinaryIO, io.BufferedReader(stream))


def is_remote(source: str | Path) -> bool:
    """Whether fsspec is to find it: ``s3://``, ``hf://``, ``gs://``, ``https://`` ..."""
    return "://" in str(source)


def files_of(source: str | Path, splits: Sequence[str], scratch: Path) -> list[File]:
    """The files that a name stands for, in the order of their names, in which numbers count as numbers.

    Args:
        source: A file; a folder, of which the files of a known kind are shards of one table; a pattern such as
            ``"data/train-*.parquet"``; a path that fsspec knows, to any of these; or a data set that
            ``datasets.load_dataset`` knows, ``NAME``, ``NAME:SUBSET`` or ``NAME:SUBSET:SPLIT``.
        splits: Which split is taken where there are several and none is named: the first of these that is there. Of
            none of these, a split has to be named. A folder in which only some names hold a split's word is taken whole
            for :data:`ALL`, and refused for others: no file is left out in silence.
        scratch: Where copies of what is not on this machine are put. What lies there from an earlier call, and is still
            what it was, is not copied again.

    Raises:
        FileNotFoundError: If there is nothing of that name.
        ValueError: If a folder holds no table, or more than one.
        OSError: If a remote path cannot be read.
        ImportError: If a package is missing that reads it.
    """
    here = files_here(source, splits)
    if here is not None:
        return here
    name = str(source)
    return _fetched(name, splits, scratch) if is_remote(name) else [_of_the_hub(name, splits, scratch)]


def files_here(source: str | Path, splits: Sequence[str]) -> list[File] | None:
    """The files that a name stands for; None if they are not on this machine, and to be copied to it.

    Args and errors as for :func:`files_of`.
    """
    name = str(source)
    path = Path(name)
    if is_remote(name):
        return None
    if path.is_dir():
        return [File.of(each) for each in _shards(name, list(path.iterdir()), splits)]
    if path.exists():
        return [File.of(path)]
    if has_magic(name):
        found = [Path(each) for each in glob(name)]
        if not found:
            raise FileNotFoundError(f"{name}: no file has such a name.")
        return [File.of(each) for each in sorted(found, key=_natural)]
    if path.suffix.lower() in (*KINDS, *COMPRESSIONS) or not _HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"{name}: there is no such file. Check the name.")
    return None


def _of_the_hub(name: str, splits: Sequence[str], scratch: Path) -> File:
    """A data set of the Hub, as a Parquet file."""
    parts = name.split(":")
    title, subset, split = parts + [""] * (3 - len(parts))
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
    with atomic_file(scratch / "rows.parquet") as stream:
        found.to_parquet(stream)
    shown = f"{title}{f', {subset}' if subset else ''}, split {split}"
    return File(scratch / "rows.parquet", shown, "parquet")


def _fetched(name: str, splits: Sequence[str], scratch: Path) -> list[File]:
    """Copies of the files of a remote path."""
    core = require("fsspec.core", "data", "A remote path")
    folder: list[PurePosixPath] | None = None
    with _asking(name):
        filesystem, path = core.url_to_fs(name)
        paths = [path]
        if has_magic(path):
            paths = sorted(filesystem.glob(path), key=_natural)
            if not paths:
                raise FileNotFoundError(path)
        # To ask for a folder where a suffix tells a file would be to list it, which not every server can.
        elif not File.of(Path(_file_name(path))).kind and filesystem.isdir(path):
            folder = [PurePosixPath(each) for each in filesystem.ls(path, detail=False)]
    if folder is not None:
        paths = [str(each) for each in _shards(name, folder, splits)]
    # A folder of its own for each, so that it keeps its name, by whose end it is read.
    places = [scratch / f"{number:06}" / _file_name(each) for number, each in enumerate(paths)]
    with _asking(name):
        names = [name if each == path else str(filesystem.unstrip_protocol(each)) for each in paths]
        # Of a file system its checksum tells a file from one that was written in its place.
        wanted = json.dumps([[each, filesystem.checksum(each)] for each in paths])
        copied = scratch / "copied.json"
        if not (copied.is_file() and copied.read_text("utf-8") == wanted):
            shutil.rmtree(scratch, ignore_errors=True)
            for each, place in zip(paths, places, strict=True):
                place.parent.mkdir(parents=True)
                filesystem.get_file(each, str(place))
            # Last: where it is, all are whole.
            copied.write_text(wanted, "utf-8")
    return [File.of(place, shown) for place, shown in zip(places, names, strict=True)]


@contextmanager
def _asking(name: str) -> Iterator[None]:
    """What a file system refuses, in a sentence: each has errors of its own."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{name}: fsspec cannot read it here ({error}).") from None
    except Exception as error:
        if is_full(error):
            raise
        # Over http, fsspec calls every failure a missing file: a refused connection, a timeout, a wrong password.
        reason = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        if isinstance(reason, FileNotFoundError) or getattr(reason, "status", None) in _NOT_THERE:
            raise FileNotFoundError(f"{name}: there is no such file. Check the name.") from None
        raise OSError(f"{name} cannot be read ({str(reason).strip() or type(reason).__name__}).") from error


def _file_name(path: str) -> str:
    """The last part of a path or an address, without what is asked of a server behind it."""
    return re.sub(r"[?#].*", "", path).rstrip("/").rpartition("/")[2]


def _shards(name: str, inside: Sequence[Any], splits: Sequence[str]) -> list[Any]:
    """The paths in a folder that are one table, in order."""
    seen = [path for path in inside if not path.name.startswith((".", "_"))]
    tables = sorted((path for path in seen if File.of(Path(path.name)).kind), key=_natural)
    # Beside shards, .json holds what is known about them.
    tables = [path for path in tables if not path.name.lower().endswith(".json")] or tables
    if not tables:
        there = ", ".join(sorted(path.name for path in seen)[:5]) or "nothing"
        raise ValueError(
            f"{name} is a directory without a table in it ({there}): give a file, or a folder of {FORMATS}."
        )
    of_split: dict[str, list[Any]] = {}
    for path in tables:
        words = _SPLIT.findall(path.name.lower())
        of_split.setdefault(_SPLIT_OF[words[-1]] if words else "", []).append(path)
    # Where some names hold no split's word, the others may hold one by chance. To read all is then to read the whole
    # folder; but to measure or to train on the whole folder might mix splits.
    by_chance = "" in of_split
    if len(of_split) > 1 and not (by_chance and not splits):
        asked = "" if by_chance else next((each for each in splits if each in of_split), "")
        if not asked:
            parts = ", ".join(f"{each or 'none in the name'} ({paths[0].name})" for each, paths in of_split.items())
            raise ValueError(
                f'{name} holds files of several splits, {parts}: give a pattern, such as "{name}/*train*".'
            )
        tables = of_split[asked]
    kinds = sorted({File.of(Path(path.name)).kind for path in tables})
    if len(kinds) > 1:
        raise ValueError(f"{name} holds files of several kinds, {', '.join(kinds)}: give one file, or a pattern.")
    return tables


def _natural(path: Any) -> list[tuple[int, str]]:
    """A key by which 10 comes after 9."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in parts]
