"""Training data: files of rows, or a data set by its name, as ``datasets.Dataset`` with known columns."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..optional import require_datasets


@dataclass(frozen=True)
class Column:
    """A column: what it is called here, what others call it, and the value that a cell holds.

    Attributes:
        name: Its name in the data set that is made.
        others: Names that published files use for it.
        read: Cell to value; a ValueError says what is wrong with the cell.
    """

    name: str
    others: tuple[str, ...]
    read: Callable[[Any], Any]

    def find(self, header: Sequence[str]) -> str | None:
        """What a header calls it, or None if it does not have it."""
        return next((title for title in header if title.strip().lower() in (self.name, *self.others)), None)


def _text(cell: Any) -> str:
    if not isinstance(cell, str):
        raise ValueError(f"{cell!r} is not text")
    if not cell.strip():
        raise ValueError("an empty text")
    return cell


def _number(least: float, most: float) -> Callable[[Any], float]:
    def read(cell: Any) -> float:
        try:
            number = float(cell)
        except (TypeError, ValueError):
            number = math.nan
        if not least <= number <= most or math.isinf(number):
            within = "a number" if math.isinf(most) else f"a number from {least:g} to {most:g}"
            raise ValueError(f"{cell!r} is not {within}")
        return number

    return read


_SCORE = ("label", "labels", "scores", "similarity", "similarity_score")
_TRIPLET = (
    Column("anchor", ("premise", "sent0", "query"), _text),
    Column("positive", ("entailment", "sent1"), _text),
    Column("negative", ("contradiction", "hard_neg"), _text),
)
_PAIR = (
    Column("sentence1", ("sentence_1", "text1", "sentence_a"), _text),
    Column("sentence2", ("sentence_2", "text2", "sentence_b"), _text),
)
_SCORED = (*_PAIR, Column("score", _SCORE, _number(-math.inf, math.inf)))
_CONDITIONAL = (*_PAIR, Column("condition", (), _text), Column("score", _SCORE, _number(1, 5)))
_SENTENCE = (Column("sentence", ("text", "sentences", "texts"), _text),)


def read_triplets(source: str | Path) -> Any:
    """Read (anchor, positive, hard negative), as from NLI: premise, entailment, contradiction.

    Args:
        source: A file: .tsv or .csv, with a header that names the columns or else in this order; or .jsonl, one object
            a line. Or ``NAME``, ``NAME:SUBSET`` or ``NAME:SUBSET:SPLIT`` of a data set that ``datasets.load_dataset``
            knows; the split is ``train`` unless it is given.

    Returns:
        A ``datasets.Dataset`` with the columns anchor, positive and negative.

    Raises:
        ValueError: If a row is malformed, naming file, line and what is expected; or there is none; or ``source`` is
            neither a file that can be read nor a data set.
        ImportError: If ``datasets`` is not installed.
    """
    return _read(source, _TRIPLET)


def read_scored_pairs(source: str | Path) -> Any:
    """Read pairs of texts and how similar they are: columns sentence1, sentence2 and score.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, _SCORED)


def read_conditional_pairs(source: str | Path) -> Any:
    """Read rows of conditional similarity (C-STS): columns sentence1, sentence2, condition and score, 1 to 5.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, _CONDITIONAL)


def read_sentences(source: str | Path) -> Any:
    """Read texts: the column sentence. A .txt file holds one a line; in other files further columns are passed over.

    Args and errors as for :func:`read_triplets`.
    """
    return _read(source, _SENTENCE)


def _read(source: str | Path, columns: Sequence[Column]) -> Any:
    datasets = require_datasets()
    path = Path(source)
    if path.is_file():
        table: dict[str, list[Any]] = {column.name: [] for column in columns}
        for where, row in _file_rows(path, columns):
            for name, value in _values(row, columns, where).items():
                table[name].append(value)
        data = datasets.Dataset.from_dict(table)
    else:
        data = _named_dataset(str(source), columns, datasets)
    if len(data) == 0:
        raise ValueError(f"{source} holds no rows. {_expected(columns)}")
    return data


def _values(row: Mapping[str, Any], columns: Sequence[Column], where: str) -> dict[str, Any]:
    values = {}
    for column in columns:
        try:
            values[column.name] = column.read(row.get(column.name))
        except ValueError as error:
            raise ValueError(f"{where}: {column.name}: {error}. {_expected(columns)}") from None
    return values


def _expected(columns: Sequence[Column]) -> str:
    return f"A row is {', '.join(column.name for column in columns)}."


def _file_rows(path: Path, columns: Sequence[Column]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row of a file by our names, and what to call it."""
    kind = path.suffix.lower()
    if kind in (".jsonl", ".ndjson"):
        yield from _json_rows(path, columns)
    elif kind == ".csv":
        yield from _table_rows(path, columns, _csv_cells(path))
    elif kind == ".tsv" or (kind == ".txt" and len(columns) == 1):
        separated = ((number, line.split("\t")) for number, line in _lines(path))
        yield from _table_rows(path, columns, separated, titled=kind != ".txt")
    else:
        raise ValueError(f"{path}: {kind or 'no ending'} is none of .tsv, .csv and .jsonl. {_expected(columns)}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, and their numbers."""
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason}). Save it as UTF-8.") from None
            if line.strip():
                yield number, line


def _csv_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file and the line that each begins at: a quoted cell may run over several."""
    begins = 1
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    yield begins, cells
                begins = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{path}, line {begins}: {error}. A quotation mark may be missing.") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, after line {begins}: not UTF-8 ({error.reason}). Save it as UTF-8.") from None


def _table_rows(
    path: Path, columns: Sequence[Column], rows: Iterable[tuple[int, list[str]]], titled: bool = True
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Cells by the header's names; where there is no header, by their order."""
    places: dict[str, int] | None = None
    count = len(columns)
    for number, cells in rows:
        if places is None:
            found = [column.find(cells) for column in columns] if titled else [None]
            titles = [title for title in found if title is not None]
            if len(titles) == len(columns):
                places = {column.name: cells.index(title) for column, title in zip(columns, titles, strict=True)}
                count = len(cells)
                continue
            places = {column.name: index for index, column in enumerate(columns)}
        if len(cells) != count:
            raise ValueError(
                f"{path}, line {number}: {len(cells)} columns where {count} are expected. {_expected(columns)} "
                "Other columns need a header that names these."
            )
        yield f"{path}, line {number}", {name: cells[index] for name, index in places.items()}


def _json_rows(path: Path, columns: Sequence[Column]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg}). {_expected(columns)}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: not an object but {line[:40]!r}. {_expected(columns)}")
        yield where, {column.name: row[title] for column in columns if (title := column.find(list(row))) is not None}


def _named_dataset(source: str, columns: Sequence[Column], datasets: Any) -> Any:
    name, subset, split, *more = [*source.split(":"), "", ""][: max(3, source.count(":") + 1)]
    if more:
        raise ValueError(f"{source!r}: give a file, or a data set as NAME, NAME:SUBSET or NAME:SUBSET:SPLIT.")
    try:
        data = datasets.load_dataset(name, subset or None, split=split or "train")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source!r} is no file, and datasets cannot load it either: {' '.join(str(error).split())}"
        ) from None
    titles = {column.name: column.find(data.column_names) for column in columns}
    if missing := [name for name, title in titles.items() if title is None]:
        raise ValueError(f"{source} lacks {', '.join(missing)}; its columns are {', '.join(data.column_names)}.")
    data = data.select_columns(list(titles.values())).rename_columns(
        {title: name for name, title in titles.items() if title != name}
    )
    for number, row in enumerate(data):
        _values(row, columns, f"{source}, row {number}")
    return data
