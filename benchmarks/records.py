"""Results as data: one CSV file per subject in ``benchmarks/results``.

A new row replaces the one with the same keys. Scores and differences are fractions: 0.738 is shown as 73.8. An empty
field is an empty text, or no number.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import polars as pl

from st_reba.files import atomic_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Value = str | int | float | None
Record = dict[str, Value]

#: Columns that identify a measurement, by file.
KEYS: dict[str, tuple[str, ...]] = {
    "architectures": ("architecture", "recipe"),
    "scores": ("model", "weights", "precision", "set", "metric", "recipe", "pooling", "filter"),
    "claims": ("claim", "model", "precision", "set", "first", "second"),
    "cost": ("table", "quantity", "contender", "unit", "model", "precision", "tokens", "batch"),
    "retrieval": ("model", "precision", "set", "metric", "recipe", "pooling", "filter"),
    "rerank": ("model", "precision", "max_tokens", "set", "depth", "reading"),
    "freeze": ("model", "precision", "set", "method", "pairs", "seed", "reading", "metric"),
    "bellm": ("model", "triplets", "set", "metric", "method", "turned", "reading", "seed"),
    "jtcse": ("model", "precision", "set", "metric", "method", "steps", "texts", "seed"),
    "grid": ("model", "precision", "set", "metric", "recipe", "filter", "fitted_on", "against"),
    "compare_errors": ("quantity", "metric", "items", "recipes", "candidates", "case"),
    "compared": ("version", "model", "set", "metric"),
    "loaded": ("model", "precision", "quantity"),
    "one_process": ("model", "precision", "threads", "quantity", "contender"),
    "removed": ("name",),
    "llama_cpp": ("model", "quantity", "set", "contender", "threads"),
}
#: Columns of scores or differences of scores, in any file.
FRACTIONS = ("score", "difference", "ahead")
#: Columns of numbers; all others are text.
TYPES: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(
        ("depth", "tokens", "batch", "max_tokens", "queries", "documents", "pairs",
         "seed", "seeds", "ahead_seeds", "texts", "steps", "items", "recipes", "candidates", "runs"), pl.Int64,
    ),
    **dict.fromkeys(
        (*FRACTIONS, "low", "high", "ahead_low", "ahead_high", "value", "control_score", "control_ahead",
         "control_low", "control_high", "plain_score", "plain_ahead", "plain_low", "plain_high", "seconds", "size",
         "at_least", "at_most"),
        pl.Float64,
    ),
}  # fmt: skip


def read(name: str, directory: Path = RESULTS) -> pl.DataFrame:
    """Read the rows of a file.

    Args:
        name: A key of :data:`KEYS`; the file is ``directory/name.csv``.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If a score is not a fraction.
    """
    path, columns = directory / f"{name}.csv", columns_of(name)
    types = {column: TYPES.get(column, pl.String) for column in columns}
    frame = pl.read_csv(path, schema_overrides=types).select(columns).with_columns(pl.col(pl.String).fill_null(""))
    scores = frame.select(each for each in FRACTIONS if each in columns)
    # A difference of two correlations reaches from -2 to 2.
    if wrong := [column.name for column in scores if not (column.drop_nulls().abs() <= 2).all()]:
        raise ValueError(f"{path}: {', '.join(wrong)}: a score is a fraction, such as 0.738, and no other number.")
    return frame


def columns_of(name: str, directory: Path = RESULTS) -> list[str]:
    """Return the columns of a file; a new file has those of its namesake in benchmarks/results."""
    path = directory / f"{name}.csv"
    with (path if path.is_file() else RESULTS / path.name).open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


def rewrite(
    name: str,
    rows: Iterable[Mapping[str, Value]],
    directory: Path = RESULTS,
    instead_of: Mapping[str, str] | None = None,
) -> None:
    """Add rows to a file, in place of those with the same keys, and sort all.

    Args:
        name: A key of :data:`KEYS`.
        rows: The new rows.
        directory: Directory of the file.
        instead_of: Fields and values of further rows to remove.

    Raises:
        ValueError: If a row has a field that the file has no column for.
    """
    path, columns = directory / f"{name}.csv", columns_of(name, directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    latest: dict[tuple[str, ...], dict[str, str]] = {}
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            there = [row for row in csv.DictReader(file) if not instead_of or not instead_of.items() <= row.items()]
            latest = {tuple(row[key] for key in KEYS[name]): row for row in there}
    for row in rows:
        text = {column: "" if row.get(column) is None else str(row[column]) for column in {*columns, *row}}
        latest[tuple(text[column] for column in KEYS[name])] = text
    # Numbers by size.
    order = sorted(latest, key=lambda key: [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in key])
    with atomic_file(path, "w") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(latest[key] for key in order)


def today() -> dict[str, str]:
    """Return today's date and the versions of packages, as fields of a row."""
    packages = ("torch", "transformers", "sentence-transformers")
    return {"date": time.strftime("%Y-%m-%d"), "versions": ", ".join(f"{name} {version(name)}" for name in packages)}


def machine(device: str, threads: int) -> str:
    """Return the name of the accelerator, or of the processor with the number of threads."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{processor}; {threads} thread{'s' if threads > 1 else ''}"
