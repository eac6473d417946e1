"""Tables of all kinds to columns of values: what columns are called, here and by others, and what their cells hold."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from .rows import check_characters, listed, parquet_file, rows
from .sources import TO_MEASURE, File, files_of


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: What it is called here.
        others: Names that published files use for it; capitals do not count, and a hyphen or a space is an underscore.
        read: Cell to value; a ValueError says what is wrong with the cell.
        needed: Whether a table must have it.
    """

    name: str
    others: tuple[str, ...]
    read: Callable[[Any], Any]
    needed: bool = True

    def find(self, header: Collection[str]) -> str | None:
        """What a header calls it, or None if it does not have it."""
        if self.name in header:
            return self.name
        titles: dict[str, str] = {}
        for title in header:
            titles.setdefault(_plain(title), title)
        return next((titles[name] for name in map(_plain, (self.name, *self.others)) if name in titles), None)


@dataclass(frozen=True)
class Schema:
    """What a row of a table is.

    Attributes:
        name: What the rows are, such as ``"pairs"``.
        columns: In the order in which they stand where there is no header.
        option: What says which column of a file is which; empty: their names alone.
        headed: Whether a file must name its columns.
    """

    name: str
    columns: tuple[Column, ...]
    option: str = "--columns"
    headed: bool = False

    @property
    def needed(self) -> list[str]:
        """The names of the columns that a table must have."""
        return [column.name for column in self.columns if column.needed]

    @property
    def in_words(self) -> str:
        """What each column may be called, in a sentence."""
        ways = []
        for column in self.columns:
            others = f" (or {', '.join(column.others)})" if column.others else ""
            ways.append(f"{column.name}{others}{'' if column.needed else ', if any'}")
        return f"{self.name.capitalize()} have {'; '.join(ways)}."

    @property
    def expected(self) -> str:
        """In a sentence."""
        return f"A row is {', '.join(self.needed)}."

    @property
    def remedy(self) -> str:
        """What to do where a file calls its columns something else."""
        if not self.option:
            return "call them so"
        return f"say with {self.option} which is what, by their names or, without a header, by their places from 1"

    def find(self, header: Collection[str]) -> dict[str, str]:
        """By the columns' names, what a header calls those that it has."""
        titles = {column.name: column.find(header) for column in self.columns}
        return {name: title for name, title in titles.items() if title is not None}

    def lacking(self, titles: Collection[str]) -> list[str]:
        """The needed columns that are not among these, by their names."""
        # A kept column may be called as that of the texts.
        return [name for name in dict.fromkeys(self.needed) if name not in titles]

    def asked(self, columns: str) -> dict[str, str]:
        """By the columns' names, what a user calls them; nothing if that does not fit.

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
        return found if found.keys() <= set(every) and not self.lacking(found) and all(found.values()) else {}


@dataclass(frozen=True)
class Header:
    """Which columns of a file are read.

    Attributes:
        schema: What its rows are.
        titles: By the columns' names, what the file calls them: places, from 1, where it does not say.
        every: All that the file calls its columns.
        unsure: Where the first row stands, if the file does not name its columns, or names them in words that are not
            known here; else empty.
        fixed: Whether all rows have these titles: lines of JSON may differ in what they call things.
    """

    schema: Schema
    titles: dict[str, str]
    every: list[str]
    unsure: str = ""
    fixed: bool = True

    @property
    def unread(self) -> list[str]:
        """What else the file calls its columns."""
        return [title for title in self.every if title not in self.titles.values()]


def named_columns(
    header: Collection[str], schemas: Sequence[Schema], asked: str | None
) -> tuple[Schema, dict[str, str]] | None:
    """The first schema that titles fit, and by the names of its columns which title each has; None if none does.

    Args:
        header: The titles.
        schemas: What rows may be.
        asked: What the columns are called, as :meth:`Schema.asked` takes it; None: by their usual names.
    """
    for schema in schemas:
        titles = schema.find(header) if asked is None else schema.asked(asked)
        if not schema.lacking(titles) and set(titles.values()) <= set(header):
            return schema, titles
    return None


def _header(where: str, kind: str, names: list[str], schemas: Sequence[Schema], asked: str | None) -> Header:
    """The columns of a file, by their names, or by the cells of its first row, which may be names."""
    # No line of plain text names columns.
    found = None if kind == "txt" else named_columns(names, schemas, asked)
    if found is not None:
        for title in found[1].values():
            if (count := names.count(title)) > 1:
                raise ValueError(f'{where}: {count} columns are called "{title}", in {listed(names)}.')
        # Other lines of JSON may call things otherwise, and have more of them.
        return Header(*found, names, fixed=kind != "jsonl" or asked is not None)
    meant_as_names = schemas[0].headed or len(_known(names, schemas)) > 1
    if kind in ("jsonl", "parquet") or (asked is None and meant_as_names):
        raise _unfit(where, names, schemas, asked)
    places = [str(place) for place, _ in enumerate(names, 1)]
    if asked is not None:
        found = named_columns(places, schemas, asked)
        if found is None:
            raise _unfit(where, names, schemas, asked)
        return Header(*found, places, where)
    fitting = [schema for schema in schemas if len(schema.needed) == len(names)]
    if not fitting and len(schemas) > 1:
        ways = "; ".join(f"{', '.join(schema.needed)} ({schema.name})" for schema in schemas)
        said = f"{where}: {len(names)} columns, and no header that names them. Rows are {ways}."
        raise ValueError(f"{said} {_what_to_do(schemas)}")
    schema = (fitting or schemas)[0]
    titles = {name: str(place) for place, name in enumerate(schema.needed, 1)}
    return Header(schema, titles, list(titles.values()), where)


@dataclass
class Table:
    """A table that was read.

    Attributes:
        name: What the user calls it.
        header: Which columns it has, by its first file.
        values: By the columns' names.
        places: Where each row stands: the file, and the line, or the row of Parquet.
    """

    name: str
    header: Header
    values: dict[str, list[Any]]
    places: list[tuple[File, int]]

    def __len__(self) -> int:
        return len(self.places)

    def where(self, row: int) -> str:
        """Where a row stands, for messages."""
        return place(*self.places[row])

    @property
    def in_words(self) -> str:
        """Which columns were read, and which were not."""
        names = [name if title == name else f"{title} as {name}" for name, title in self.header.titles.items()]
        if self.header.unsure:
            return f"columns: {', '.join(self.header.schema.needed)}, in this order: there is no header"
        left = f"; not read: {', '.join(self.header.unread)}" if self.header.unread else ""
        return f"columns: {', '.join(names)}{left}"


def place(file: File, line: int) -> str:
    """Where something stands in a file, for messages."""
    return f"{file.name}, {'row' if file.kind == 'parquet' else 'line'} {line}"


def read_table(
    source: str | Path, schemas: Sequence[Schema], columns: str | None = None, splits: Sequence[str] = TO_MEASURE
) -> Table:
    """Read a table, whose files may be many.

    Args:
        source: As for :func:`st_reba.data.sources.files_of`. Each of its files may have a header of its own.
        schemas: What the rows may be: the first that the columns fit is taken.
        columns: What the columns are called, as :meth:`Schema.asked` takes it; None: by their usual names.
        splits: As for :func:`st_reba.data.sources.files_of`.

    Raises:
        ValueError: If a row is malformed, naming file and line; or there is none; or no schema fits.
        FileNotFoundError: If there is nothing of that name.
        OSError: If it cannot be read.
        ImportError: If a package is missing that reads it.
    """
    if columns is not None and not any(schema.asked(columns) for schema in schemas):
        ways = " or ".join(f"{','.join(f'{name}=...' for name in each.needed)} ({each.name})" for each in schemas)
        raise ValueError(f"--columns {columns}: give {ways}, with the file's own names, or places from 1.")
    first: Header | None = None
    found: list[list[Any]] = []
    places: list[tuple[File, int]] = []
    # What is not on this machine is copied to it, until it is read.
    with tempfile.TemporaryDirectory(prefix="st-reba-") as scratch:
        for file in files_of(source, splits, Path(scratch)):
            header, content = opened(file, schemas if first is None else [first.schema], columns)
            if header is None:
                continue
            first = first or header
            for line, values in content:
                found.append(values)
                places.append((file, line))
    if first is None or not found:
        rows = "; or ".join(", ".join(each.needed) for each in schemas)
        raise ValueError(f"{source} holds no rows. A row is {rows}.")
    cells = zip(*found, strict=True)
    by_name = {column.name: list(own) for column, own in zip(first.schema.columns, cells, strict=True)}
    return Table(str(source), first, by_name, places)


def opened(
    file: File, schemas: Sequence[Schema], asked: str | None = None
) -> tuple[Header | None, Iterator[tuple[int, list[Any]]]]:
    """Which columns of a file are read, None if there is no row; and the line and the values of each row.

    Args and errors as for :func:`read_table`.
    """
    file = _sniffed(file, schemas)
    if file.kind == "parquet":
        names = parquet_file(file).schema_arrow.names
        header = _header(place(file, 1), file.kind, names, schemas, asked)
        # Other columns may be large: vectors, images.
        return header, _values(file, header, rows(file, list(header.titles.values())))
    content = rows(file)
    if file.kind == "txt":
        # Every line is a row, also an empty one, which a table has none of.
        content = ((line, [text]) for line, text in content if text.strip())
    first = next(content, None)
    if first is None:
        return None, content
    line, cells = first
    names = list(cells) if file.kind == "jsonl" else [cell.strip() for cell in cells]
    header = _header(place(file, line), file.kind, names, schemas, asked)
    named = file.kind != "jsonl" and not header.unsure
    return header, _values(file, header, content if named else chain([first], content))


def _values(file: File, header: Header, content: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, list[Any]]]:
    """The line and the values of each row, in the order of the schema's columns."""
    schema = header.schema
    for line, row in content:
        if isinstance(row, list):
            if len(row) != len(header.every):
                more = " Other columns need a header that names these." if header.unsure else ""
                raise ValueError(
                    f"{place(file, line)}: {len(row)} columns where {len(header.every)} are expected. "
                    f"{schema.expected}{more}"
                )
            row = dict(zip(header.every, row, strict=True))
        titles = header.titles if header.fixed or list(row) == header.every else schema.find(row)
        if not header.fixed and schema.lacking(titles):
            raise _unfit(place(file, line), row, [schema])
        cells = [row.get(titles.get(column.name)) for column in schema.columns]
        values = []
        try:
            for column, cell in zip(schema.columns, cells, strict=True):
                values.append(column.read(cell))
        except ValueError as error:
            where = place(file, line)
            said = f"{where}: {column.name}: {str(error).rstrip('.')}. {schema.expected}"
            hint = f" If this line names the columns, or they stand in another order, {schema.remedy}."
            raise ValueError(said + hint if where == header.unsure else said) from None
        yield line, values


def _sniffed(file: File, schemas: Sequence[Schema]) -> File:
    """A file whose name does not tell what it is, by its first line that is not empty.

    Of plain text only a line with tabs may be a row of several columns.

    Raises:
        ValueError: If that line names columns with commas between, which ``.csv`` would tell.
    """
    several = any(len(schema.needed) > 1 for schema in schemas)
    if file.kind and not (file.kind == "txt" and several):
        return file
    plain = replace(file, kind="txt")
    line, first = next(((line, text) for line, text in rows(plain) if text.strip()), (1, ""))
    if len(named := _known(first.split(","), schemas)) > 1:
        raise ValueError(
            f"{place(file, line)}: names columns ({', '.join(named)}) with commas between. Is it CSV? Then end the "
            "file's name in .csv."
        )
    if "\t" in first:
        return replace(file, kind="tsv")
    return replace(file, kind="jsonl") if not file.kind and first.lstrip().startswith("{") else plain


def _unfit(where: str, header: Collection[str], schemas: Sequence[Schema], asked: str | None = None) -> ValueError:
    """What is wrong with titles that fit no schema."""
    if asked is not None:
        wanted = next(titles for schema in schemas if (titles := schema.asked(asked)))
        missing = [title for title in wanted.values() if title not in header]
        return ValueError(f"{where}: no column {listed(missing)}, but {listed(header)}.")
    lack = " or ".join(f"{', '.join(schema.lacking(schema.find(header)))} ({schema.name})" for schema in schemas)
    said = f"{where} lacks {lack}; its columns are {', '.join(header)}."
    return ValueError(f"{said} {_what_to_do(schemas)}")


def _what_to_do(schemas: Sequence[Schema]) -> str:
    """Where no schema fits: say which column is which, or call them by names that are known."""
    known = [schema.in_words for schema in schemas if any(column.others for column in schema.columns)]
    return " ".join([f"{schemas[0].remedy.capitalize()}.", *known])


def _known(header: Iterable[str], schemas: Sequence[Schema]) -> list[str]:
    """Those of a header's titles that some schema knows."""
    names = {_plain(name) for schema in schemas for column in schema.columns for name in (column.name, *column.others)}
    return [title for title in header if _plain(title) in names]


def _plain(title: str) -> str:
    return re.sub(r"[\s-]+", "_", title.strip().lower())


def any_text(cell: Any) -> str:
    """A text, which may be empty."""
    if not isinstance(cell, str):
        raise ValueError(f"{cell!r} is not text")
    check_characters(cell, "the text")
    return cell


def text(cell: Any) -> str:
    """A text that is not empty."""
    if not any_text(cell).strip():
        raise ValueError("an empty text")
    return str(cell)


def _text_if_any(cell: Any) -> str:
    return "" if cell is None else any_text(cell)


def _identifier(cell: Any) -> str:
    """A text or a whole number: pandas writes 1 as 1.0 where another row of its column has none."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    if isinstance(cell, bool) or not isinstance(cell, (str, int)) or not str(cell).strip():
        raise ValueError(f"{cell!r} is no identifier")
    return str(cell).strip()


def _label(cell: Any) -> str:
    """What stands there: a text, a number, or true or false."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float) and math.isfinite(cell) and not cell.is_integer():
        return str(cell)
    try:
        return _identifier(cell)
    except ValueError:
        raise ValueError(f"{cell!r} is no label") from None


_WORDS: dict[str, str | float] = {"true": 1.0, "false": 0.0}


def number(least: float = -math.inf, most: float = math.inf) -> Callable[[Any], float]:
    """Reads a number within a range; true and false are 1 and 0."""

    def read(cell: Any) -> float:
        word = _WORDS.get(cell.strip().lower(), cell) if isinstance(cell, str) else cell
        try:
            # To Python 1_000 is a number.
            found = math.nan if isinstance(word, str) and "_" in word else float(word)
        except (TypeError, ValueError):
            found = math.nan
        if not least <= found <= most or math.isinf(found):
            within = "a number" if math.isinf(most) else f"a number from {least:g} to {most:g}"
            raise ValueError(f"{cell!r} is not {within}")
        return found

    return read


_SCORE = ("scores", "label", "labels", "similarity", "similarity_score", "relatedness_score", "is_duplicate")
_FIRST = ("sentence_1", "sent1", "text1", "text_1", "sentence_a", "text_a", "question1", "premise", "query")
_SECOND = ("sentence_2", "sent2", "text2", "text_2", "sentence_b", "text_b", "question2", "hypothesis", "document",
           "passage")  # fmt: skip
_PAIR = (Column("sentence1", _FIRST, text), Column("sentence2", _SECOND, text))
PAIRS = Schema("pairs", (*_PAIR, Column("score", _SCORE, number())))
TRIPLETS = Schema(
    "triplets",
    (
        Column("anchor", ("premise", "sent0", "query", "question"), text),
        Column("positive", ("entailment", "sent1", "pos", "positive_passage"), text),
        Column("negative", ("contradiction", "hard_neg", "neg", "hard_negative", "negative_passage"), text),
    ),
)
CONDITIONAL = Schema(
    "conditional pairs", (*_PAIR, Column("condition", (), text), Column("score", _SCORE, number(1, 5)))
)
_TEXT = Column("text", ("sentence", "utterance", "texts", "sentences"), text)
CLASSES = Schema(
    "texts with labels",
    (
        _TEXT,
        Column("label", ("labels", "label_text", "class", "category", "intent", "topic", "target", "coarse_label",
                         "emotion"), _label),
    ),
)  # fmt: skip
TEXTS = Schema("texts", (_TEXT,))
SENTENCES = Schema("texts", (Column("sentence", ("text", "sentences", "texts"), text),))

_QUERY = ("query_id", "qid", "query")
_DOCUMENT = ("corpus_id", "document_id", "doc_id", "docid", "passage_id", "pid", "document")
_ID = ("id",)
QUERIES = Schema(
    "queries", (Column("_id", (*_ID, *_QUERY[:2]), _identifier), Column("text", ("query", "question"), text))
)
CORPUS = Schema(
    "documents",
    (
        Column("_id", (*_ID, *_DOCUMENT[:-1]), _identifier),
        Column("text", ("document", "passage", "contents", "body"), _text_if_any),
        Column("title", (), _text_if_any, needed=False),
    ),
)
QRELS = Schema(
    "judgements",
    (
        Column("query-id", _QUERY, _identifier),
        Column("corpus-id", _DOCUMENT, _identifier),
        Column("score", ("relevance", "label", "rel"), number()),
    ),
)
