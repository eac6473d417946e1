"""What recipes are measured on: the user's own tables and texts, labelled or not, whatever files they come in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

from .columns import CLASSES, CORPUS, PAIRS, QRELS, QUERIES, TEXTS, TRIPLETS, Table, may_name, read_table
from .sources import is_remote

#: Fewer different texts than this have no spread to measure.
LEAST_TEXTS = 3

#: Called with a line that says what was read.
Tell = Callable[[str], None]


class _Items:
    """Labelled items."""

    #: Noun for the items.
    noun: ClassVar[str]

    def items(self) -> list[tuple[str, ...]]:
        """Return the texts of each item that belong to it alone."""
        raise NotImplementedError

    def part(self, indices: Sequence[int]) -> Self:
        """Return some of the items."""
        raise NotImplementedError

    def head(self, count: int) -> Self:
        """Return the first few."""
        return self.part(range(count))

    def texts(self) -> list[str]:
        """Return every text once: the first ones of all items, then the second ones."""
        return list(dict.fromkeys(chain(*zip(*self.items(), strict=True))))

    def __len__(self) -> int:
        return len(self.items())


@dataclass(frozen=True)
class Pairs(_Items):
    """Sentence pairs with a graded similarity, or in two classes; the three lists are equally long.

    Attributes:
        first: Texts.
        second: As many others.
        scores: More is more alike.
        two_classes: Whether the scores are labels of two classes, the higher the one of pairs that are alike; None:
            whether there are two different ones.
    """

    first: list[str]
    second: list[str]
    scores: list[float]
    two_classes: bool | None = None

    noun: ClassVar[str] = "pairs"

    def __post_init__(self) -> None:
        if self.two_classes is None:
            object.__setattr__(self, "two_classes", len(set(self.scores)) == 2)

    def items(self) -> list[tuple[str, ...]]:
        return list(zip(self.first, self.second, strict=True))

    def part(self, indices: Sequence[int]) -> Pairs:
        first, second, scores = _picked(indices, self.first, self.second, self.scores)
        return Pairs(first, second, scores, self.two_classes)


@dataclass(frozen=True)
class Triplets(_Items):
    """Texts with one that is alike and one that is less so; the three lists are equally long."""

    anchors: list[str]
    positives: list[str]
    negatives: list[str]

    noun: ClassVar[str] = "triplets"

    def items(self) -> list[tuple[str, ...]]:
        return list(zip(self.anchors, self.positives, self.negatives, strict=True))

    def part(self, indices: Sequence[int]) -> Triplets:
        return Triplets(*_picked(indices, self.anchors, self.positives, self.negatives))


@dataclass(frozen=True)
class Retrieval(_Items):
    """Queries, and which of many documents are relevant to each.

    Attributes:
        queries: By their identifiers; each has something relevant.
        documents: By theirs; a title comes before the text.
        relevant: By the queries' identifiers, those of documents, in order.
        prompts: Text before a ``"query"`` and before a ``"document"`` when it is embedded.
    """

    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, tuple[str, ...]]
    prompts: Mapping[str, str] = field(default_factory=dict)

    noun: ClassVar[str] = "queries"

    def items(self) -> list[tuple[str, ...]]:
        """Return the text of each query. The documents belong to all of them."""
        return [(text,) for text in self.queries.values()]

    def texts(self) -> list[str]:
        """Return every text once, the queries first."""
        return list(dict.fromkeys([*self.queries.values(), *self.documents.values()]))

    def part(self, indices: Sequence[int]) -> Retrieval:
        """Return some of the queries, among all documents."""
        (names,) = _picked(indices, list(self.queries))
        queries = {name: self.queries[name] for name in names}
        return replace(self, queries=queries, relevant={name: self.relevant[name] for name in names})

    def head(self, count: int) -> Retrieval:
        """Return the first few queries, among their relevant documents and as large a share of the others."""
        part = self.part(range(count))
        asked = {name for names in part.relevant.values() for name in names}
        others = [name for name in self.documents if name not in asked]
        random.Random(0).shuffle(others)
        kept = asked.union(others[: len(others) * count // len(self)])
        return replace(part, documents={name: text for name, text in self.documents.items() if name in kept})


@dataclass(frozen=True)
class Classes(_Items):
    """Texts, each of one class.

    Attributes:
        labels: By the text, the name of its class.
    """

    labels: dict[str, str]

    noun: ClassVar[str] = "texts"

    def items(self) -> list[tuple[str, ...]]:
        return [(text,) for text in self.labels]

    def part(self, indices: Sequence[int]) -> Classes:
        return Classes(dict(*_picked(indices, list(self.labels.items()))))


def _picked(indices: Sequence[int], *columns: list[Any]) -> list[list[Any]]:
    return [[column[index] for index in indices] for column in columns]


#: What has labels.
Labelled: TypeAlias = Pairs | Triplets | Retrieval | Classes
#: What recipes are measured on; plain texts have no labels.
Data: TypeAlias = Labelled | list[str]


def read_data(
    source: str | Path,
    columns: str | None = None,
    tell: Tell = lambda line: None,
    *,
    scored: bool = True,
    separator: str | None = None,
) -> Data:
    """Read pairs, triplets, a retrieval task, texts with labels or plain texts, whichever a source holds.

    A table is known by the names of its columns; without a header, rows of two texts and a number are pairs, and rows
    of two columns a text and its label. A file that ends in ``.txt`` holds plain texts, one a line. A folder with
    ``corpus``, ``queries`` and ``qrels`` is a retrieval task.

    Args:
        source: As for :func:`st_reba.data.sources.files_of`.
        columns: Titles of the columns: see :meth:`st_reba.data.columns.Schema.asked`.
        tell: Called with a line that says what was read.
        scored: Whether the labels of texts are to score by: texts that are alone in their class are left out then, and
            two classes must be left. Else such texts are plain ones, whatever their labels.
        separator: See :meth:`st_reba.data.sources.File.separate`.

    Raises:
        ValueError: If a row does not fit, naming file and line; or if the labels leave nothing to score.
        FileNotFoundError: If there is nothing of that name.
        OSError: If it cannot be read.
        ImportError: If a package is missing that reads it.
    """
    if columns is None and separator is None and (retrieval := _in_layout_of_beir(source)) is not None:
        return read_retrieval(*retrieval, tell=tell)
    table = read_table(source, (PAIRS, TRIPLETS, CLASSES, TEXTS), columns, separator=separator)
    schema = table.schema
    if schema is PAIRS:
        return _pairs(table, columns, tell)
    if schema is CLASSES and scored:
        return _classes(table, columns, tell)
    if schema is not TRIPLETS:
        return _texts(table, tell, or_labels=schema is TEXTS and columns is None)
    triplets = Triplets(*table.values.values())
    tell(f"{source}: {len(triplets):,} triplets; {table.in_words}.")
    return triplets


def read_pairs(source: str | Path, columns: str | None = None, tell: Tell = lambda line: None) -> Pairs:
    """Read pairs of texts with a score.

    Args and errors as for :func:`read_data`; a source without pairs is refused.
    """
    return _pairs(read_table(source, [PAIRS], columns), columns, tell)


def read_retrieval(
    queries: str | Path,
    corpus: str | Path,
    qrels: str | Path,
    prompts: Mapping[str, str] | None = None,
    tell: Tell = lambda line: None,
) -> Retrieval:
    """Read a retrieval task, in the layout of BEIR.

    Args:
        queries: With the columns ``_id`` and ``text``.
        corpus: The documents, with ``_id`` and ``text``, and ``title`` if there are titles.
        qrels: With ``query-id``, ``corpus-id`` and ``score``; above 0 is relevant. Queries without anything relevant
            are left out.
        prompts: As :attr:`Retrieval.prompts`.
        tell: Called with a line that says what was read.

    Raises:
        ValueError: If a row does not fit, naming file and line; or if an identifier is there twice, or a judgement is
            of a query or a document that is not there; or nothing is relevant.
        FileNotFoundError: If there is nothing of one of these names.
    """
    asked, documents = _by_identifier(read_table(queries, [QUERIES])), _by_identifier(read_table(corpus, [CORPUS]))
    relevant: dict[str, dict[str, None]] = {query: {} for query in asked}
    table = read_table(qrels, [QRELS])
    for row, (query, document, score) in enumerate(zip(*table.values.values(), strict=True)):
        for name, known, what, where in ((query, asked, "query", queries), (document, documents, "document", corpus)):
            if name not in known:
                raise ValueError(f'{table.where(row)}: there is no {what} "{name}" in {where}.')
        # The last judgement counts.
        if score > 0:
            relevant[query][document] = None
        else:
            relevant[query].pop(document, None)
    kept = {query: text for query, text in asked.items() if relevant[query]}
    if not kept:
        raise ValueError(f"{qrels}: nothing is relevant: no score is above 0.")
    found = Retrieval(kept, documents, {query: tuple(relevant[query]) for query in kept}, prompts or {})
    alone, judged = len(asked) - len(kept), sum(map(len, found.relevant.values()))
    left = f"; left out, for nothing is relevant to them: {alone:,} of {len(asked):,} queries" if alone else ""
    told = f"{len(kept):,} queries, {len(documents):,} documents, {judged:,} judged relevant"
    tell(f"{queries}, {corpus}, {qrels}: {told}{left}.")
    return found


def _by_identifier(table: Table) -> dict[str, str]:
    titles = table.values.get("title") or [""] * len(table.places)
    found: dict[str, str] = {}
    for row, (name, title, text) in enumerate(zip(table.values["_id"], titles, table.values["text"], strict=True)):
        if name in found:
            kind = table.schema.name
            raise ValueError(f'{table.where(row)}: "{name}" stands twice: give each of the {kind} an _id.')
        found[name] = f"{title} {text}".strip()
    return found


def _in_layout_of_beir(source: str | Path) -> tuple[Path, Path, Path] | None:
    """Return the three tables in a folder, if it is one of BEIR's."""
    if is_remote(source) or not Path(source).is_dir():
        return None
    paths = {path.name.partition(".")[0]: path for path in sorted(Path(source).iterdir())}
    if not {"queries", "corpus", "qrels"} <= paths.keys():
        return None
    return paths["queries"], paths["corpus"], paths["qrels"]


def _texts(table: Table, tell: Tell, or_labels: bool) -> list[str]:
    """Return plain texts; ``or_labels``: tell how another column would be read as their labels."""
    texts = [text.strip() for text in table.values["text"]]
    how = f"read without labels; {table.in_words}"
    if table.places[0][0].kind == "txt":
        how = "one a line"
        if tabs := [row for row, text in enumerate(texts) if "\t" in text]:
            raise ValueError(
                f"{table.where(tabs[0])}: has a tab, and plain texts have none. If tabs separate columns, end the name "
                "of the file in .tsv."
            )
    if (different := len(set(texts))) < LEAST_TEXTS:
        raise ValueError(f"{table.name}: {different} different texts; at least {LEAST_TEXTS} are needed.")
    if or_labels and table.unread:
        how += f" (--columns {table.titles['text']},NAME reads the column NAME as labels)"
    tell(f"{table.name}: {len(texts):,} plain texts, {how}.")
    return texts


def _pairs(table: Table, columns: str | None, tell: Tell) -> Pairs:
    first, second, scores = table.values.values()
    pairs = Pairs(first, second, scores)
    if len(different := set(pairs.scores)) < 2:
        raise ValueError(f"{table.name}: {len(pairs)} pairs of one score leave nothing to rank.")
    titles = list(table.titles.values())
    inference = (titles[0].strip().lower(), titles[2].strip().lower()) in (("premise", "label"), ("premise", "labels"))
    if columns is None and inference and different <= {-1.0, 0.0, 1.0, 2.0}:
        raise ValueError(
            f"{table.name}: {titles[2]} numbers the classes of inference, and a higher number is not more alike. Make "
            f"a score of it; or, if it is one, say so: --columns {','.join(titles)}."
        )
    least, most = min(different), max(different)
    told = f"with scores from {least:g} to {most:g}"
    if pairs.two_classes:
        alike = pairs.scores.count(most)
        told = f"in two classes, {alike:,} alike ({most:g}) and {len(pairs) - alike:,} not ({least:g})"
    tell(f"{table.name}: {len(pairs):,} pairs {told}; {table.in_words}.")
    return pairs


def _classes(table: Table, columns: str | None, tell: Tell) -> Classes:
    """Return the texts that share their label with another one: without that, no neighbour has the class of a text."""
    first: dict[str, str] = {}
    again = others = 0
    for text, label in zip(*table.values.values(), strict=True):
        # A text that is there again counts once: it would be its own neighbour.
        again += text in first
        others += first.setdefault(text, label) != label
    sizes = Counter(first.values())
    classes = Classes({text: label for text, label in first.items() if sizes[label] > 1})
    row = [table.values[name][0] for name in ("text", "label")]
    in_doubt = table.unsure and columns is None and sizes[row[1]] == 1 < max(sizes.values())
    title, other = row if in_doubt and may_name(row) else (table.titles["text"], table.titles["label"])
    remedy = (
        "Two columns are a text and its label; pairs have a third one, their score. "
        f"--columns {title},{other} says which is the text, which the label; --columns {title} reads plain texts."
    )
    if in_doubt:
        raise ValueError(
            f'{table.where(0)}: no other text has the label "{row[1]}". Does this line name the columns? {remedy}'
        )
    if (found := sum(size > 1 for size in sizes.values())) < 2:
        raise ValueError(
            f"{table.name}: labels that two texts or more have: {found} of {len(sizes):,}; two are needed. {remedy}"
        )
    left = f"; left out, for the same text stands before: {again:,}, {others:,} with another label" if again else ""
    if alone := len(first) - len(classes):
        left += f"; left out, for no other text has their label: {alone:,}"
    tell(f"{table.name}: {len(classes):,} texts in {found:,} classes{left}; {table.in_words}.")
    return classes
