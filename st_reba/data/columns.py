"""What the columns of a table are called, here and by others, and what their cells hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .records import listed


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

    def find(self, header: Iterable[str]) -> str | None:
        """What a header calls it, or None if it does not have it."""
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
    """

    name: str
    columns: tuple[Column, ...]

    @property
    def needed(self) -> list[Column]:
        return [column for column in self.columns if column.needed]

    @property
    def expected(self) -> str:
        """In a sentence."""
        return f"A row is {', '.join(column.name for column in self.needed)}."

    def find(self, header: Sequence[str]) -> dict[str, str] | None:
        """By the columns' names, what a header calls them; None if it lacks one that is needed."""
        found = {column.name: column.find(header) for column in self.columns}
        if any(found[column.name] is None for column in self.needed):
            return None
        return {name: title for name, title in found.items() if title is not None}

    def asked(self, columns: str) -> dict[str, str] | None:
        """By the columns' names, what a user calls them; None if that does not fit.

        Args:
            columns: As ``--columns`` has it: ``"sentence1=question1,sentence2=question2,score=is_duplicate"``, or
                the titles alone in the order of :attr:`columns`; a number is a place, from 1.
        """
        parts = [part.strip() for part in columns.split(",")]
        if not any("=" in part for part in parts):
            names = [column.name for column in (self.columns if len(parts) == len(self.columns) else self.needed)]
            return dict(zip(names, parts, strict=True)) if len(parts) == len(names) else None
        found = {name.strip(): title.strip() for name, _, title in (part.partition("=") for part in parts)}
        fits = found.keys() <= {column.name for column in self.columns} and all(found.values())
        return found if fits and all(column.name in found for column in self.needed) else None


def match_asked(schemas: Sequence[Schema], columns: str) -> dict[str, dict[str, str]]:
    """By the schemas' names, what ``--columns`` calls their columns.

    Raises:
        ValueError: If it fits none.
    """
    found = {schema.name: titles for schema in schemas if (titles := schema.asked(columns)) is not None}
    if not found:
        ways = " or ".join(
            f"{','.join(f'{column.name}=...' for column in each.needed)} ({each.name})" for each in schemas
        )
        raise ValueError(f"--columns {columns}: give {ways}, with the file's own names, or places from 1.")
    return found


def known(header: Iterable[str], schemas: Sequence[Schema]) -> list[str]:
    """Those of a header's titles that some schema knows."""
    names = {_plain(name) for schema in schemas for column in schema.columns for name in (column.name, *column.others)}
    return [title for title in header if _plain(title) in names]


def lacking(
    where: str, header: Sequence[str], schemas: Sequence[Schema], titles: Mapping[str, str] | None = None
) -> ValueError:
    """What is wrong with a header that fits no schema, or lacks one of the titles that were asked for."""
    if titles is not None:
        missing = [title for title in titles.values() if title not in header]
        return ValueError(f"{where}: no column {listed(missing)}, but {listed(header)}.")
    lack = [
        f"{', '.join(column.name for column in schema.needed if column.find(header) is None)} ({schema.name})"
        for schema in schemas
    ]
    return ValueError(
        f"{where} lacks {' or '.join(lack)}; its columns are {', '.join(header)}. Say with --columns which is what."
    )


def _plain(title: str) -> str:
    return re.sub(r"[\s-]+", "_", title.strip().lower())


def text(cell: Any) -> str:
    """A text that is not empty."""
    if not isinstance(cell, str):
        raise ValueError(f"{cell!r} is not text")
    if not cell.strip():
        raise ValueError("an empty text")
    try:
        cell.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half of a surrogate pair, which is no character") from None
    return cell


def _any_text(cell: Any) -> str:
    """A text, which may be empty or missing."""
    return "" if cell is None else text(cell) if str(cell).strip() else ""


def _identifier(cell: Any) -> str:
    if isinstance(cell, bool) or not isinstance(cell, (str, int)) or not str(cell).strip():
        raise ValueError(f"{cell!r} is no identifier")
    return str(cell).strip()


_WORDS = {"true": 1.0, "false": 0.0}


def number(least: float = -math.inf, most: float = math.inf) -> Callable[[Any], float]:
    """Reads a number within a range; true and false are 1 and 0."""

    def read(cell: Any) -> float:
        word = cell.strip().lower() if isinstance(cell, str) else ""
        try:
            found = _WORDS[word] if word in _WORDS else float(cell)
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
TEXTS = Schema("texts", (Column("text", ("sentence", "texts", "sentences"), text),))
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
        Column("text", ("document", "passage", "contents", "body"), _any_text),
        Column("title", (), _any_text, needed=False),
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
