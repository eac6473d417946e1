"""What was measured, as data: one CSV file a subject in ``benchmarks/results``.

Rows are only ever added. Where a later row measures the same as an earlier one, tables show the later one.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

#: A language model of 8.4M parameters, the tests' own: see its README.md.
DEMO_MODEL = ROOT / "tests" / "demo_lm"

Value = str | int | float | None
Record = dict[str, Value]

#: The columns of each file, with the type of those that are numbers. An empty field is an empty text, or no number.
#: Scores and differences are fractions: 0.738 is shown as 73.8.
COLUMNS: dict[str, dict[str, type]] = {
    "scores": {
        "model": str, "weights": str, "precision": str, "set": str, "metric": str, "recipe": str, "layer": int,
        "pooling": str, "filter": str, "score": float, "low": float, "high": float, "beyond_overlap": float,
        "beyond_low": float, "beyond_high": float, "texts": int, "date": str, "versions": str,
    },
    "claims": {
        "claim": str, "model": str, "precision": str, "set": str, "first": str, "second": str, "difference": float,
        "low": float, "high": float, "date": str,
    },
    "ablations": {
        "model": str, "precision": str, "set": str, "recipe": str, "change": str, "score": float,
        "difference": float, "low": float, "high": float, "date": str, "versions": str,
    },
    "dependency": {
        "model": str, "weights": str, "precision": str, "set": str, "recipe": str, "layer": int, "median": float,
        "low": float, "high": float, "date": str, "versions": str,
    },
    "cost": {
        "table": str, "quantity": str, "contender": str, "unit": str, "model": str, "precision": str, "tokens": int,
        "batch": int, "value": float, "low": float, "high": float, "how": str, "date": str, "machine": str,
        "versions": str,
    },
    "retrieval": {
        "model": str, "precision": str, "set": str, "metric": str, "recipe": str, "pooling": str, "filter": str,
        "score": float, "low": float, "high": float, "seconds": float, "max_tokens": int, "queries": int,
        "documents": int, "date": str, "machine": str, "versions": str,
    },
    "serving": {
        "model": str, "clients": int, "quantity": str, "value": float, "date": str, "machine": str, "versions": str,
    },
    "static": {
        "model": str, "set": str, "recipe": str, "layer": int, "dimensions": int, "precision": str, "score": float,
        "low": float, "high": float, "speed": float, "size": float, "date": str, "machine": str, "versions": str,
    },
    "freeze": {
        "model": str, "precision": str, "set": str, "method": str, "template": str, "layers": str, "width": str,
        "dimensions": int, "loss": str, "rate": float, "pairs": int, "seed": int, "reading": str, "metric": str,
        "score": float, "low": float, "high": float, "ahead": float, "ahead_low": float, "ahead_high": float,
        "seconds": int, "date": str, "versions": str,
    },
    "distil": {
        "model": str, "precision": str, "set": str, "teacher": str, "corpus": str, "texts": int, "student": str,
        "dimensions": int, "score": float, "low": float, "high": float, "share": float, "share_low": float,
        "share_high": float, "agreement": float, "neighbours": float, "seconds": int, "date": str, "versions": str,
    },
    "bellm": {
        "model": str, "precision": str, "triplets": str, "set": str, "metric": str, "method": str, "turned": str,
        "reading": str, "seed": int, "seeds": int, "score": float, "low": float, "high": float, "ahead": float,
        "ahead_low": float, "ahead_high": float, "ahead_seeds": int, "date": str, "versions": str,
    },
    "jtcse": {
        "model": str, "precision": str, "set": str, "metric": str, "method": str, "steps": int, "texts": int,
        "seed": int, "score": float, "low": float, "high": float, "ahead": float, "ahead_low": float,
        "ahead_high": float, "date": str, "versions": str,
    },
    "held_out": {
        "model": str, "precision": str, "set": str, "metric": str, "recipe": str, "score": float, "low": float,
        "high": float, "against": str, "ahead": float, "ahead_low": float, "ahead_high": float, "texts": int,
        "date": str, "versions": str,
    },
    "several": {
        "model": str, "precision": str, "copies": int, "set": str, "metric": str, "recipe": str, "score": float,
        "low": float, "high": float, "against": str, "ahead": float, "ahead_low": float, "ahead_high": float,
        "texts": int, "date": str, "versions": str,
    },
    "wordings": {
        "model": str, "precision": str, "language": str, "stage": str, "copies": int, "task": str, "readout": str,
        "ending": str, "origin": str, "score": float, "texts": int, "date": str, "versions": str,
    },
    "beginnings": {
        "model": str, "precision": str, "language": str, "task": str, "layout": str, "score": float, "texts": int,
        "date": str, "versions": str,
    },
    "install": {
        "part": str, "packages": int, "megabytes": float, "python": str, "system": str, "date": str, "versions": str,
    },
    "batches": {
        "module": str, "model": str, "precision": str, "distance": float, "date": str, "machine": str, "versions": str,
    },
}  # fmt: skip

#: What decides whether two rows measure the same.
KEYS: dict[str, tuple[str, ...]] = {
    "scores": ("model", "weights", "precision", "set", "metric", "recipe", "layer", "pooling", "filter"),
    "claims": ("claim", "model", "precision", "set", "first", "second"),
    "ablations": ("model", "precision", "set", "recipe", "change"),
    "dependency": ("model", "weights", "precision", "set", "recipe", "layer"),
    "cost": ("table", "quantity", "contender", "unit", "model", "precision", "tokens", "batch"),
    "retrieval": ("model", "precision", "set", "metric", "recipe", "pooling", "filter"),
    "static": ("model", "set", "recipe", "layer", "dimensions", "precision"),
    "freeze": ("model", "precision", "set", "method", "pairs", "seed", "reading", "metric"),
    "distil": ("model", "precision", "set", "teacher", "corpus", "texts", "student"),
    "bellm": ("model", "triplets", "set", "metric", "method", "turned", "reading", "seed"),
    "jtcse": ("model", "precision", "set", "metric", "method", "steps", "texts", "seed"),
    "batches": ("module", "model", "precision"),
    "serving": ("model", "clients", "quantity"),
    "held_out": ("model", "precision", "set", "metric", "recipe", "against", "texts"),
    "several": ("model", "precision", "copies", "set", "recipe", "against"),
    "wordings": ("model", "precision", "language", "stage", "copies", "task", "readout", "ending"),
    "beginnings": ("model", "precision", "language", "task", "layout"),
    "install": ("part", "python", "system"),
}
FRACTIONS = {
    "scores": ("score", "beyond_overlap"),
    "claims": ("difference",),
    "ablations": ("score", "difference"),
    "retrieval": ("score",),
    "static": ("score",),
    "freeze": ("score", "ahead"),
    "distil": ("score", "agreement"),
    "bellm": ("score", "ahead"),
    "jtcse": ("score", "ahead"),
    "held_out": ("score", "ahead"),
    "several": ("score", "ahead"),
    "wordings": ("score",),
    "beginnings": ("score",),
}
ALLOWED = {"weights": ("trained", "random")}


class RecordsError(Exception):
    """A file of results that is not there, or cannot be read as one."""


def read(name: str, directory: Path = RESULTS) -> list[Record]:
    """The rows of a file, numbers as numbers, each measurement once.

    Args:
        name: A key of :data:`COLUMNS`; the file is ``directory/name.csv``.

    Raises:
        RecordsError: If the file is missing, lacks a column, or a field is not what its column holds.
    """
    path = directory / f"{name}.csv"
    if not path.is_file():
        raise RecordsError(f"{shown(path)} is not there; tables that are made from it cannot be filled.")
    columns = COLUMNS[name]
    latest: dict[tuple[Value, ...], Record] = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, [])
        if missing := [column for column in columns if column not in header]:
            raise RecordsError(
                f"{shown(path)} has no column {', '.join(missing)}; its columns are {', '.join(columns)}."
            )
        try:
            for fields in filter(None, reader):
                record = _record(name, header, fields, f"{shown(path)}, line {reader.line_num}")
                latest[tuple(record[key] for key in KEYS[name])] = record
        except csv.Error as error:
            raise RecordsError(f"{shown(path)}, line {reader.line_num}: {error}.") from None
    return list(latest.values())


def append(name: str, records: Iterable[Mapping[str, Value]], directory: Path = RESULTS) -> Path:
    """Add rows to a file, which is made where it is missing.

    Raises:
        RecordsError: If the file is there with other columns.
        ValueError: If a record has a field that the file has no column for.
    """
    path = directory / f"{name}.csv"
    columns = COLUMNS[name]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), [])
        if header != list(columns):
            raise RecordsError(f"{shown(path)} has the columns {', '.join(header)}; rows have {', '.join(columns)}.")
    else:
        directory.mkdir(parents=True, exist_ok=True)
        writer.writeheader()
    writer.writerows(records)
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text.getvalue())
    return path


def rewrite(name: str, records: Iterable[Mapping[str, Value]], directory: Path = RESULTS) -> Path:
    """Put rows in the place of those that measured the same, and leave the others.

    Raises:
        RecordsError: If the file cannot be read.
        ValueError: If a record has a field that the file has no column for.
    """
    path = directory / f"{name}.csv"
    rows: dict[tuple[Value, ...], Mapping[str, Value]] = {}
    for record in [*(read(name, directory) if path.is_file() else []), *records]:
        rows[tuple(record.get(key) for key in KEYS[name])] = record
    path.unlink(missing_ok=True)
    return append(
        name, [rows[key] for key in sorted(rows, key=lambda key: [_sortable(part) for part in key])], directory
    )


def _sortable(part: Value) -> tuple[bool, float, str]:
    """Nothing first, numbers by size."""
    return (part is not None, part, "") if isinstance(part, (int, float)) else (part is not None, 0, part or "")


def versions() -> str:
    """Of what is measured with."""
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers"))


def machine(device: str, threads: int) -> str:
    """The accelerator, or the processor and its threads."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{processor}; {threads} thread{'s' if threads > 1 else ''}"


def shown(path: Path) -> str:
    """A path as messages show it: from the repository's root, where it lies there."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _record(name: str, header: list[str], fields: list[str], place: str) -> Record:
    if len(fields) != len(header):
        raise RecordsError(f"{place} has {len(fields)} fields, not {len(header)}.")
    given = dict(zip(header, fields, strict=True))
    record = {
        column: given[column] if kind is str else _number(given[column], kind, column, place)
        for column, kind in COLUMNS[name].items()
    }
    for column in FRACTIONS.get(name, ()):
        value = record[column]
        # A difference of two correlations reaches from -2 to 2.
        if isinstance(value, float) and abs(value) > 2:
            raise RecordsError(f"{place}: {column} is {value}; scores are fractions, such as 0.738.")
    for column, allowed in ALLOWED.items():
        if column in record and record[column] not in allowed:
            raise RecordsError(f"{place}: {column} is {record[column]!r}; it is one of {', '.join(allowed)}.")
    return record


def _number(field: str, kind: type, column: str, place: str) -> Value:
    if not field:
        return None
    try:
        value = kind(field)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RecordsError(f"{place}: {column} is {field!r}, which is no {'whole ' if kind is int else ''}number.")
    return value
