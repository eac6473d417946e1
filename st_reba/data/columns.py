"""Tables: names of columns, here and in published files, and values of cells."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from .sources import TO_MEASURE, File, check_characters, files_of, listed, parquet_schema, place, read_rows


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        name: Name of the column.
        others: Names in published files, separated by spaces. Case is ignored, and a hyphen or a space in a title
            counts as an underscore.
        read: Function from a cell to its value, which raises a ValueError for an invalid cell.
        needed: Whether a table must have the column.
    """

    name: str
    others: str
    read: Callable[[Any], Any]
    needed: bool = True

    def find(self, header: Collection[str]) -> str | None:
        """Return the title of the column in a header, or None if the column is missing."""
        if self.name in header:
            return self.name
        titles = {_plain(title): title for title in reversed(list(header))}
        return next((titles[name] for name in (_plain(self.name), *self.others.split()) if name in titles), None)


#: Remedy where no option names columns.
NAMED = "Give the columns these names."
_REMEDY = (
    "If the columns have other names or another order, give --columns with their names or, without a header, with "
    "their positions from 1."
)


@dataclass(frozen=True)
class Schema:
    """Kind of rows of a table.

    Attributes:
        name: Noun for the rows, such as ``"pairs"``.
        columns: Columns in the order of a file without a header.
        remedy: Sentence for errors about the names of columns.
        headed: Whether a file must have a header.
    """

    name: str
    columns: tuple[Column, ...]
    remedy: str = _REMEDY
    headed: bool = False

    @property
    def needed(self) -> list[str]:
        """Names of the columns that a table must have."""
        # Without duplicates: a kept column may have the name of the texts' column.
        return list(dict.fromkeys(column.name for column in self.columns if column.needed))

    def find(self, header: Collection[str]) -> dict[str, str]:
        """Return the titles of the columns that a header has, by the columns' names."""
        titles = {column.name: column.find(header) for column in self.columns}
        return {name: title for name, title in titles.items() if title is not None}

    def parse(self, columns: str) -> dict[str, str]:
        """Return the titles that a user gives, by the columns' names; empty if they do not fit the schema.

        Args:
            columns: Value of ``--columns``, such as ``"sentence1=question1,sentence2=question2,score=is_duplicate"``,
                or titles alone, in the order of :attr:`columns`. A number is a position, from 1.
        """
        parts = [part.strip() for part in columns.split(",")]
        names = [column.name for column in self.columns]
        if not any("=" in part for part in parts):
            if len(parts) == len(self.needed):
                names = self.needed
            return dict(zip(names, parts, strict=True)) if len(parts) == len(names) else {}
        titles = {name.strip(): title.strip() for name, _, title in (part.partition("=") for part in parts)}
        return titles if set(self.needed) <= titles.keys() <= set(names) and all(titles.values()) else {}


@dataclass
class Table:
    """Table with its values.

    Attributes:
        schema: Kind of its rows.
        titles: Titles in the file by the columns' names, or positions from 1 if the file has no header.
        every: All titles of the file.
        unsure: Place of the first row if the file has no known header, else an empty string.
        name: Name of the table in messages.
        values: Values by the columns' names.
        places: File and line (in Parquet, the row) of each row.
    """

    schema: Schema
    titles: dict[str, str]
    every: list[str]
    unsure: str = ""
    name: str = ""
    values: dict[str, list[Any]] = field(default_factory=dict)
    places: list[tuple[File, int]] = field(default_factory=list)

    def where(self, row: int) -> str:
        """Return the place of a row, for messages."""
        return place(*self.places[row])

    @property
    def description(self) -> str:
        """Used and unused columns, for messages."""
        if self.unsure:
            return f"columns: {', '.join(self.schema.needed)}, in this order: there is no header"
        names = [name if title == name else f"{title} as {name}" for name, title in self.titles.items()]
        unread = ", ".join(title for title in self.every if title not in self.titles.values())
        return f"columns: {', '.join(names)}{f'; not read: {unread}' if unread else ''}"


def read_table(
    source: str | Path,
    schemas: Sequence[Schema],
    columns: str | None = None,
    splits: Sequence[str] = TO_MEASURE,
    separator: str | None = None,
) -> Table:
    """Read a table from one or more files.

    Args:
        source: Source of the files: see :func:`st_reba.data.sources.files_of`. Each file may have its own header.
        schemas: Possible kinds of rows, of which the first that fits the columns is used.
        columns: Titles of the columns: see :meth:`Schema.parse`. None looks for the known names.
        splits: Preferred splits: see :func:`st_reba.data.sources.files_of`.
        separator: Separator of the columns: see :meth:`st_reba.data.sources.File.separate`.

    Raises:
        ValueError: If a row is malformed, there are no rows, or no schema fits. The message names file and line.
        FileNotFoundError: If the source does not exist.
        OSError: If the source cannot be read.
        ImportError: If a package is missing that reads the source.
    """
    if columns is not None and not any(schema.parse(columns) for schema in schemas):
        ways = [f"{','.join(f'{name}=...' for name in schema.needed)} ({schema.name})" for schema in schemas]
        raise ValueError(f"--columns {columns}: give {' or '.join(ways)}, with names in the file or positions from 1.")
    table: Table | None = None
    rows: list[list[Any]] = []
    places: list[tuple[File, int]] = []
    # Remote files are copied here while they are read.
    with tempfile.TemporaryDirectory(prefix="st-reba-") as scratch:
        for file in files_of(source, splits, Path(scratch)):
            file.separate(separator)
            shard, content = opened(file, [table.schema] if table else schemas, columns)
            table = table or shard
            for line, values in content:
                rows.append(values)
                places.append((file, line))
    if table is None or not rows:
        raise ValueError(f"{source} holds no rows. {_rows_are(schemas, remedy=False)}")
    cells = zip(*rows, strict=True)
    by_name = {column.name: list(values) for column, values in zip(table.schema.columns, cells, strict=True)}
    return replace(table, name=str(source), values=by_name, places=places)


def opened(
    file: File, schemas: Sequence[Schema], columns: str | None = None
) -> tuple[Table | None, Iterator[tuple[int, list[Any]]]]:
    """Return the header of a file, or None if it has no rows, and the line and values of each row.

    Arguments and errors are those of :func:`read_table`.
    """
    if file.kind == "parquet":
        table = _header(file, 1, parquet_schema(file).names, schemas, columns)
        # Unused columns may be large, such as vectors or images.
        return table, _values(file, table, read_rows(file, list(table.titles.values())), columns)
    content = read_rows(file)
    if file.kind == "txt":
        # A table has no empty rows.
        content = ((line, [text]) for line, text in content if text.strip())
    first = next(content, None)
    if first is None:
        return None, content
    names = list(first[1]) if file.kind == "jsonl" else [cell.strip() for cell in first[1]]
    table = _header(file, first[0], names, schemas, columns)
    if file.kind == "jsonl" or table.unsure:
        content = chain([first], content)
    return table, _values(file, table, content, columns)


def _header(file: File, line: int, names: list[str], schemas: Sequence[Schema], asked: str | None) -> Table:
    """Return an empty table with the columns that a header, or the first row, has."""
    where, in_cells = place(file, line), file.kind not in ("jsonl", "parquet")
    positions = [str(number) for number, _ in enumerate(names, 1)]
    if file.kind == "txt" and len(titles := _known(re.split(r"[,;\t]", names[0]), schemas)) > 1:
        raise ValueError(f"{where}: names columns, {listed(titles)}. End the name of the file in .csv or .tsv.")
    # Plain text has no header.
    if file.kind != "txt" and (match := _match(names, schemas, asked)) is not None:
        if repeated := [title for title in match[1].values() if names.count(title) > 1]:
            raise ValueError(f"{where}: several columns are called {listed(repeated)}, in {listed(names)}.")
        return Table(*match, names)
    if asked is not None and in_cells and (match := _match(positions, schemas, asked)) is not None:
        return Table(*match, positions, where)
    # One known name in its position is enough to recognize a header.
    alike = [schema.columns for schema in schemas if 1 < len(schema.columns) == len(names)]
    known = any(column.find([name]) for columns in alike for column, name in zip(columns, names, strict=True))
    if asked is not None or not in_cells or schemas[0].headed or known or len(_known(names, schemas)) > 1:
        raise _unfit(where, names, schemas, asked)
    schema = next((schema for schema in schemas if len(schema.needed) == len(names)), None)
    if schema is None:
        raise ValueError(f"{where}: {len(names)} columns, and no header that names them. {_rows_are(schemas)}")
    return Table(schema, dict(zip(schema.needed, positions, strict=True)), positions, where)


def _match(
    header: Collection[str], schemas: Sequence[Schema], asked: str | None
) -> tuple[Schema, dict[str, str]] | None:
    """Return the first schema that fits a header and the titles by its columns' names, or None if none fits."""
    for schema in schemas:
        titles = schema.find(header) if asked is None else schema.parse(asked)
        if set(schema.needed) <= titles.keys() and set(titles.values()) <= set(header):
            return schema, titles
    return None


def _values(
    file: File, table: Table, content: Iterable[tuple[int, Any]], asked: str | None
) -> Iterator[tuple[int, list[Any]]]:
    """Yield the line and the values of each row, in the order of the schema's columns."""
    schema = table.schema
    for line, row in content:
        titles = table.titles
        if file.kind == "jsonl" and asked is None and list(row) != table.every:
            # Lines of JSON may have different names, and different numbers of columns.
            titles = schema.find(row)
            if not set(schema.needed) <= titles.keys():
                raise _unfit(place(file, line), row, [schema])
        values, prefix = [], ""
        try:
            if isinstance(row, list):
                # Positions that a user gives are valid in a longer or shorter row, too.
                by_position = asked is not None and table.unsure and len(row) >= max(map(int, titles.values()))
                if len(row) != len(table.every) and not by_position:
                    raise ValueError(f"{len(row)} columns where {len(table.every)} are expected")
                row = dict(zip(table.every, row, strict=False))
            for column in schema.columns:
                prefix = f"{column.name}: "
                values.append(column.read(row.get(titles.get(column.name))))
        except ValueError as error:
            where = place(file, line)
            row_is = _rows_are([schema], remedy=where == table.unsure)
            raise ValueError(f"{where}: {prefix}{str(error).rstrip('.')}. {row_is}") from None
        yield line, values


def _unfit(where: str, header: Collection[str], schemas: Sequence[Schema], asked: str | None = None) -> ValueError:
    """Return the error for a header that fits no schema."""
    if asked is not None:
        wanted = next(titles for schema in schemas if (titles := schema.parse(asked)))
        missing = [title for title in wanted.values() if title not in header]
        return ValueError(f"{where}: no column {listed(missing)}, but {listed(header)}.")
    lacking = [[name for name in schema.needed if name not in schema.find(header)] for schema in schemas]
    lack = " or ".join(f"{', '.join(names)} ({schema.name})" for names, schema in zip(lacking, schemas, strict=True))
    return ValueError(f"{where} lacks {lack}; its columns are {', '.join(header)}. {_rows_are(schemas)}")


def _rows_are(schemas: Sequence[Schema], remedy: bool = True) -> str:
    """Describe a row, and the remedy if the columns have other names or another order, for an error message."""
    rows = f"A row is {'; or '.join(', '.join(schema.needed) for schema in schemas)}."
    return f"{rows} {schemas[0].remedy}" if remedy else rows


def _known(header: Iterable[str], schemas: Sequence[Schema]) -> list[str]:
    """Return the titles of a header that are known to a schema."""
    return [title for title in header if any(column.find([title]) for schema in schemas for column in schema.columns)]


def _plain(title: str) -> str:
    return re.sub(r"[\s-]+", "_", title.strip().lower())


def any_text(cell: Any) -> str:
    """Read a text, which may be empty."""
    if not isinstance(cell, str):
        raise ValueError(f"{cell!r} is not text")
    check_characters(cell, "the text")
    return cell


def text(cell: Any) -> str:
    """Read a text that is not empty."""
    if not any_text(cell).strip():
        raise ValueError("an empty text")
    return str(cell)


def _text_if_any(cell: Any) -> str:
    return "" if cell is None else any_text(cell)


def _identifier(cell: Any, noun: str = "identifier") -> str:
    """Read a text or a whole number."""
    # pandas writes 1 as 1.0 if the column has a missing value.
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    if isinstance(cell, bool) or not isinstance(cell, (str, int)) or not str(cell).strip():
        raise ValueError(f"{cell!r} is no {noun}")
    return str(cell).strip()


def _label(cell: Any) -> str:
    """Read a text, a number or a boolean."""
    if isinstance(cell, bool) or (isinstance(cell, float) and math.isfinite(cell) and not cell.is_integer()):
        return str(cell).lower()
    return _identifier(cell, "label")


def number(least: float = -math.inf, most: float = math.inf) -> Callable[[Any], float]:
    """Return a function that reads numbers within a range, with true as 1 and false as 0."""

    def read(cell: Any) -> float:
        word = cell.strip().lower() if isinstance(cell, str) else cell
        try:
            # Python would read 1_000.
            value = math.nan if "_" in str(word) else float({"true": 1, "false": 0}.get(word, word))
        except (TypeError, ValueError):
            value = math.nan
        if not least <= value <= most or math.isinf(value):
            if isinstance(cell, str) and re.fullmatch(r"\s*-?\d+,\d+\s*", cell):
                raise ValueError(f"{cell!r} has a comma. Write decimals with a point, as in 0.8") from None
            within = "a number" if math.isinf(most) else f"a number from {least:g} to {most:g}"
            raise ValueError(f"{cell!r} is not {within}")
        return value

    return read


_SCORE = "scores label labels similarity similarity_score relatedness_score is_duplicate"
_PAIR = (
    Column("sentence1", "sentence_1 sent1 text1 text_1 sentence_a text_a question1 premise query", text),
    Column("sentence2", "sentence_2 sent2 text2 text_2 sentence_b text_b question2 hypothesis document passage", text),
)
_TRIPLET = (
    Column("anchor", "premise sent0 query question", text),
    Column("positive", "entailment sent1 pos positive_passage", text),
    Column("negative", "contradiction hard_neg neg hard_negative negative_passage", text),
)
_TEXT = Column("text", "sentence utterance texts sentences", text)
_LABEL = Column("label", "labels label_text class category intent topic target coarse_label emotion", _label)
_DOCUMENT = (
    Column("_id", "id corpus_id document_id doc_id docid passage_id pid", _identifier),
    Column("text", "document passage contents body", _text_if_any),
    Column("title", "", _text_if_any, needed=False),
)
_JUDGEMENT = (
    Column("query-id", "query_id qid query", _identifier),
    Column("corpus-id", "corpus_id document_id doc_id docid passage_id pid document", _identifier),
    Column("score", "relevance label rel", number()),
)
PAIRS = Schema("pairs", (*_PAIR, Column("score", _SCORE, number())))
CONDITIONAL = Schema(
    "conditional pairs", (*_PAIR, Column("condition", "", text), Column("score", _SCORE, number(1, 5)))
)
TRIPLETS = Schema("triplets", _TRIPLET)
CLASSES = Schema("texts with labels", (_TEXT, _LABEL))
TEXTS = Schema("texts", (_TEXT,))
SENTENCES = Schema("texts", (Column("sentence", "text sentences texts", text),))
QUERIES = Schema("queries", (Column("_id", "id query_id qid", _identifier), Column("text", "query question", text)))
CORPUS = Schema("documents", _DOCUMENT)
QRELS = Schema("judgements", _JUDGEMENT)
