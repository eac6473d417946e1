"""Tables of all kinds to columns of values: what columns are called, here and by others, and what their cells hold."""

from __future__ import annotations

import math
import re
import shlex
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from .rows import LONGEST, TOO_LONG, check_characters, listed, parquet_schema, place, rows
from .sources import TO_MEASURE, File, files_of


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: Its name here.
        others: Names that published files use for it, with spaces between; capitals do not count, and a hyphen or a
            space in a title is an underscore.
        read: Cell to value; a ValueError says what is wrong with the cell.
        needed: Whether a table must have it.
    """

    name: str
    others: str
    read: Callable[[Any], Any]
    needed: bool = True

    def find(self, header: Collection[str]) -> str | None:
        """Return the title of the column in a header, or None if it does not have it."""
        if self.name in header:
            return self.name
        titles = {_plain(title): title for title in reversed(list(header))}
        return next((titles[name] for name in (_plain(self.name), *self.others.split()) if name in titles), None)


@dataclass(frozen=True)
class Schema:
    """Kind of the rows of a table.

    Attributes:
        name: Noun for the rows, such as ``"pairs"``.
        columns: In the order that they have where there is no header.
        option: Option that says which column of a file is which; empty: there is none.
        headed: Whether a file must name its columns.
    """

    name: str
    columns: tuple[Column, ...]
    option: str = "--columns"
    headed: bool = False

    @property
    def needed(self) -> list[str]:
        """Names of the columns that a table must have."""
        # A kept column may be called as that of the texts.
        return list(dict.fromkeys(column.name for column in self.columns if column.needed))

    def find(self, header: Collection[str]) -> dict[str, str]:
        """Return the titles in a header of the columns that it has, by their names."""
        titles = {column.name: column.find(header) for column in self.columns}
        return {name: title for name, title in titles.items() if title is not None}

    def asked(self, columns: str) -> dict[str, str]:
        """Return a user's titles by the columns' names; nothing if they do not fit.

        Args:
            columns: As ``--columns`` has it: ``"sentence1=question1,sentence2=question2,score=is_duplicate"``, or
                the titles alone in the order of :attr:`columns`; a number is a place, from 1.
        """
        parts = [part.strip() for part in columns.split(",")]
        every = [column.name for column in self.columns]
        if not any("=" in part for part in parts):
            names = every if len(parts) == len(every) else self.needed
            return dict(zip(names, parts, strict=True)) if len(parts) == len(names) else {}
        found = {name.strip(): title.strip() for name, _, title in (part.partition("=") for part in parts)}
        return found if set(self.needed) <= found.keys() <= set(every) and all(found.values()) else {}


@dataclass
class Table:
    """A table that is read.

    Attributes:
        schema: Kind of its rows.
        titles: By the columns' names, the file's: places, from 1, if it has none.
        every: All titles of the file.
        unsure: Place of the first row, if the file does not name its columns, or names them in words that are not
            known here; else empty.
        name: Name of the table for its user.
        values: Read cells by the columns' names.
        places: File and line (of Parquet the row) of each row.
        uneven: Rows with another number of columns than the first of their file.
    """

    schema: Schema
    titles: dict[str, str]
    every: list[str]
    unsure: str = ""
    name: str = ""
    values: dict[str, list[Any]] = field(default_factory=dict)
    places: list[tuple[File, int]] = field(default_factory=list)
    uneven: int = 0

    def where(self, row: int) -> str:
        """Name the place of a row, for messages."""
        return place(*self.places[row])

    @property
    def unread(self) -> list[str]:
        """Titles of the columns that are not read."""
        return [title for title in self.every if title not in self.titles.values()]

    @property
    def in_words(self) -> str:
        """Columns that are read, and those that are not."""
        if self.unsure:
            uneven = f"; rows with another number of columns than the first: {self.uneven:,}" if self.uneven else ""
            return f"columns: {', '.join(self.schema.needed)}, in this order: there is no header{uneven}"
        names = [name if title == name else f"{title} as {name}" for name, title in self.titles.items()]
        left = f"; not read: {', '.join(self.unread)}" if self.unread else ""
        return f"columns: {', '.join(names)}{left}"


def read_table(
    source: str | Path,
    schemas: Sequence[Schema],
    columns: str | None = None,
    splits: Sequence[str] = TO_MEASURE,
    separator: str | None = None,
) -> Table:
    """Read a table, whose files may be many.

    Args:
        source: As for :func:`st_reba.data.sources.files_of`. Each of its files may have a header of its own.
        schemas: Possible kinds of rows: the first that the columns fit is taken.
        columns: Titles of the columns, as :meth:`Schema.asked` takes them; None: their usual names.
        splits: As for :func:`st_reba.data.sources.files_of`.
        separator: See :meth:`st_reba.data.sources.File.separate`.

    Raises:
        ValueError: If a row is malformed, naming file and line; or there is none; or no schema fits.
        FileNotFoundError: If there is nothing of that name.
        OSError: If it cannot be read.
        ImportError: If a package is missing that reads it.
    """
    if columns is not None and not any(schema.asked(columns) for schema in schemas):
        ways = " or ".join(f"{','.join(f'{name}=...' for name in each.needed)} ({each.name})" for each in schemas)
        raise ValueError(f"--columns {columns}: give {ways}, with the file's own names, or places from 1.")
    table: Table | None = None
    found: list[list[Any]] = []
    places: list[tuple[File, int]] = []
    # Files of other machines are copied to this one, until they are read.
    with tempfile.TemporaryDirectory(prefix="st-reba-") as scratch:
        for file in files_of(source, splits, Path(scratch)):
            file.separate(separator)
            own, content = opened(file, [table.schema] if table else schemas, columns)
            table = table or own
            for line, values in content:
                found.append(values)
                places.append((file, line))
            if table and own and own is not table:
                table.uneven += own.uneven
    if table is None or not found:
        raise ValueError(f"{source} holds no rows. {_rows_are(schemas)}")
    cells = zip(*found, strict=True)
    by_name = {column.name: list(own) for column, own in zip(table.schema.columns, cells, strict=True)}
    return replace(table, name=str(source), values=by_name, places=places)


def opened(
    file: File, schemas: Sequence[Schema], asked: str | None = None
) -> tuple[Table | None, Iterator[tuple[int, list[Any]]]]:
    """Return the header of a file, None if there is no row; and the line and the values of each row.

    Args and errors as for :func:`read_table`.
    """
    if file.kind == "parquet":
        table = _header(file, 1, parquet_schema(file).names, schemas, asked)
        # Other columns may be large: vectors, images.
        return table, _values(file, table, rows(file, list(table.titles.values())), asked)
    content = rows(file)
    if file.kind == "txt":
        # Every line is a row, also an empty one, which a table has none of.
        content = ((line, [text]) for line, text in content if text.strip())
    first = next(content, None)
    if first is None:
        return None, content
    names = list(first[1]) if file.kind == "jsonl" else [cell.strip() for cell in first[1]]
    table = _header(file, first[0], names, schemas, asked)
    if file.kind == "jsonl" or table.unsure:
        content = chain([first], content)
    return table, _values(file, table, content, asked)


def _header(file: File, line: int, names: list[str], schemas: Sequence[Schema], asked: str | None) -> Table:
    """Find the columns of a file by their names, or by the cells of its first row, which may be names."""
    where, in_cells = place(file, line), file.kind not in ("jsonl", "parquet")
    places = [str(number) for number, _ in enumerate(names, 1)]
    if file.kind == "txt" and len(titles := _known(re.split(r"[,;\t]", names[0]), schemas)) > 1:
        raise ValueError(f"{where}: names columns, {listed(titles)}. End the name of the file in .csv or .tsv.")
    # No line of plain text names columns.
    if file.kind != "txt" and (named := _named(names, schemas, asked)) is not None:
        if twice := [title for title in named[1].values() if names.count(title) > 1]:
            raise ValueError(f"{where}: several columns are called {listed(twice)}, in {listed(names)}.")
        return Table(*named, names)
    if asked is not None and in_cells and (named := _named(places, schemas, asked)) is not None:
        return Table(*named, places, where)
    # One name that is known, in its place, is enough to tell a header.
    alike = [schema.columns for schema in schemas if 1 < len(schema.columns) == len(names)]
    known = any(column.find([name]) for columns in alike for column, name in zip(columns, names, strict=True))
    if asked is not None or not in_cells or schemas[0].headed or known or len(_known(names, schemas)) > 1:
        raise _unfit(where, names, schemas, asked)
    schema = next((schema for schema in schemas if len(schema.needed) == len(names)), None)
    if schema is None:
        raise ValueError(f"{where}: {len(names)} columns, and no header that names them. {_rows_are(schemas, names)}")
    return Table(schema, dict(zip(schema.needed, places, strict=True)), places, where)


def _named(
    header: Collection[str], schemas: Sequence[Schema], asked: str | None
) -> tuple[Schema, dict[str, str]] | None:
    """Return the first schema that titles fit, and the title of each of its columns by its name; None if none fits."""
    for schema in schemas:
        titles = schema.find(header) if asked is None else schema.asked(asked)
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
            # Lines of JSON may differ in their names, and in how many columns they have.
            titles = schema.find(row)
            if not set(schema.needed) <= titles.keys():
                raise _unfit(place(file, line), row, [schema])
        values, said = [], ""
        try:
            if isinstance(row, list):
                if len(row) != len(table.every):
                    # A user's places are there whatever comes after them.
                    if asked is None or not table.unsure or len(row) < max(map(int, titles.values())):
                        raise ValueError(f"{len(row)} columns where {len(table.every)} are expected")
                    table.uneven += 1
                row = dict(zip(table.every, row, strict=False))
            for column in schema.columns:
                said = f"{column.name}: "
                values.append(column.read(row.get(titles.get(column.name))))
        except ValueError as error:
            where = place(file, line)
            names = list(row.values()) if where == table.unsure else None
            raise ValueError(f"{where}: {said}{str(error).rstrip('.')}. {_rows_are([schema], names)}") from None
        yield line, values


def _unfit(where: str, header: Collection[str], schemas: Sequence[Schema], asked: str | None = None) -> ValueError:
    """Make the refusal of titles that fit no schema."""
    if asked is not None:
        wanted = next(titles for schema in schemas if (titles := schema.asked(asked)))
        missing = [title for title in wanted.values() if title not in header]
        return ValueError(f"{where}: no column {listed(missing)}, but {listed(header)}.")
    lacking = [[name for name in schema.needed if name not in schema.find(header)] for schema in schemas]
    lack = " or ".join(f"{', '.join(names)} ({schema.name})" for names, schema in zip(lacking, schemas, strict=True))
    return ValueError(f"{where} lacks {lack}; its columns are {', '.join(header)}. {_rows_are(schemas, list(header))}")


def _rows_are(schemas: Sequence[Schema], names: Sequence[str] | None = None) -> str:
    """Say what a row is; and what to do about a file with other names, or in another order: these may be its names."""
    said = f"A row is {'; or '.join(', '.join(schema.needed) for schema in schemas)}."
    if names is None:
        return said
    if not (option := schemas[0].option):
        return f"{said} Give the columns these names."
    one = option == "--column"
    fit = one or any(len(schema.needed) == len(names) for schema in schemas)
    by_name = f" ({option} {shlex.quote(','.join(names[:1] if one else names))})" if fit and may_name(names) else ""
    if one:
        return f"{said} If the column has another name, say so{by_name}."
    return (
        f"{said} If the columns have other names or another order, say with {option} which is what, by names{by_name} "
        "or, without a header, by places from 1."
    )


def may_name(cells: Iterable[str]) -> bool:
    """Whether cells may be names of columns that ``--columns`` takes."""
    return all(re.fullmatch(r"[^,=\n]{1,40}", cell) for cell in cells)


def _known(header: Iterable[str], schemas: Sequence[Schema]) -> list[str]:
    """Return the titles of a header that some schema knows."""
    return [title for title in header if any(column.find([title]) for schema in schemas for column in schema.columns)]


def _plain(title: str) -> str:
    return re.sub(r"[\s-]+", "_", title.strip().lower())


def any_text(cell: Any) -> str:
    """Read a text, which may be empty."""
    if not isinstance(cell, str):
        raise ValueError(f"{cell!r} is not text")
    if len(cell) > LONGEST:
        raise ValueError(TOO_LONG)
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
    """Read a text or a whole number: pandas writes 1 as 1.0 where another row of its column has none."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    if isinstance(cell, bool) or not isinstance(cell, (str, int)) or not str(cell).strip():
        raise ValueError(f"{cell!r} is no {noun}")
    return str(cell).strip()


def _label(cell: Any) -> str:
    """Read a text, a number, or true or false."""
    if isinstance(cell, bool) or (isinstance(cell, float) and math.isfinite(cell) and not cell.is_integer()):
        return str(cell).lower()
    return _identifier(cell, "label")


def number(least: float = -math.inf, most: float = math.inf) -> Callable[[Any], float]:
    """Return a reader of numbers within a range; true and false are 1 and 0."""

    def read(cell: Any) -> float:
        word = cell.strip().lower() if isinstance(cell, str) else cell
        try:
            # To Python 1_000 is a number.
            found = math.nan if "_" in str(word) else float({"true": 1, "false": 0}.get(word, word))
        except (TypeError, ValueError):
            found = math.nan
        if not least <= found <= most or math.isinf(found):
            if isinstance(cell, str) and re.fullmatch(r"\s*-?\d+,\d+\s*", cell):
                raise ValueError(f"{cell!r} has a comma. Write decimals with a point, as in 0.8") from None
            within = "a number" if math.isinf(most) else f"a number from {least:g} to {most:g}"
            raise ValueError(f"{cell!r} is not {within}")
        return found

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
