"""Data that recipes are measured on: labelled tables, or plain texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

from .columns import CLASSES, CORPUS, PAIRS, QRELS, QUERIES, TEXTS, TRIPLETS, Table, read_table
from .sources import is_remote

#: Least number of different texts, as fewer have no spread to measure.
LEAST_TEXTS = 3

#: Called with a line that describes the data.
Tell = Callable[[str], None]


class _Items:
    """Labelled items."""

    #: Noun for the items.
    noun: ClassVar[str]

    def items(self) -> list[tuple[str, ...]]:
        """Return the texts of each item, without those that all items share."""
        raise NotImplementedError

    def part(self, indices: Sequence[int]) -> Self:
        """Return the items at the indices."""
        raise NotImplementedError

    def texts(self) -> list[str]:
        """Return the distinct texts: the first texts of all items, then the second ones."""
        return list(dict.fromkeys(chain(*zip(*self.items(), strict=True))))

    def __len__(self) -> int:
        return len(self.items())


@dataclass(frozen=True)
class Pairs(_Items):
    """Text pairs with graded similarities or labels of two classes, as three lists of equal length.

    Attributes:
        first: First text of each pair.
        second: Second text of each pair.
        scores: Similarity of each pair, higher for more similar texts.
        two_classes: Whether the scores are labels of two classes, the higher one for similar pairs. Defaults to whether
            there are two different scores.
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
        first, second, scores = _select(indices, self.first, self.second, self.scores)
        return Pairs(first, second, scores, self.two_classes)


@dataclass(frozen=True)
class Triplets(_Items):
    """Anchors, each with a similar and a less similar text, as three lists of equal length."""

    anchors: list[str]
    positives: list[str]
    negatives: list[str]

    noun: ClassVar[str] = "triplets"

    def items(self) -> list[tuple[str, ...]]:
        return list(zip(self.anchors, self.positives, self.negatives, strict=True))

    def part(self, indices: Sequence[int]) -> Triplets:
        return Triplets(*_select(indices, self.anchors, self.positives, self.negatives))


@dataclass(frozen=True)
class Retrieval(_Items):
    """Queries and documents, with the relevant documents of each query.

    Attributes:
        queries: Queries by identifier. Each has at least one relevant document.
        documents: Documents by identifier. A title precedes the text.
        relevant: Identifiers of the relevant documents, in order, by the query's identifier.
        prompts: Prompts for ``"query"`` and ``"document"``.
    """

    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, tuple[str, ...]]
    prompts: Mapping[str, str] = field(default_factory=dict)

    noun: ClassVar[str] = "queries"

    def items(self) -> list[tuple[str, ...]]:
        """Return the text of each query, as all queries share the documents."""
        return [(text,) for text in self.queries.values()]

    def texts(self) -> list[str]:
        """Return the distinct texts, queries first."""
        return list(dict.fromkeys([*self.queries.values(), *self.documents.values()]))

    def part(self, indices: Sequence[int]) -> Retrieval:
        """Return the queries at the indices, with all documents."""
        (names,) = _select(indices, list(self.queries))
        queries = {name: self.queries[name] for name in names}
        return replace(self, queries=queries, relevant={name: self.relevant[name] for name in names})


@dataclass(frozen=True)
class Classes(_Items):
    """Texts with classes.

    Attributes:
        labels: Names of the classes by text.
    """

    labels: dict[str, str]

    noun: ClassVar[str] = "texts"

    def items(self) -> list[tuple[str, ...]]:
        return [(text,) for text in self.labels]

    def part(self, indices: Sequence[int]) -> Classes:
        return Classes(dict(*_select(indices, list(self.labels.items()))))


def _select(indices: Sequence[int], *columns: list[Any]) -> list[list[Any]]:
    return [[column[index] for index in indices] for column in columns]


#: Data with labels.
Labelled: TypeAlias = Pairs | Triplets | Retrieval | Classes
#: Data that recipes are measured on. Plain texts have no labels.
Data: TypeAlias = Labelled | list[str]


def read_data(
    source: str | Path,
    columns: str | None = None,
    tell: Tell = lambda line: None,
    *,
    scored: bool = True,
    separator: str | None = None,
) -> Data:
    """Read the data of a source: pairs, triplets, a retrieval task, texts with labels, or plain texts.

    The names of the columns decide what a table holds. Without a header, rows of two texts and a number are pairs, and
    rows of two columns are texts with labels. A ``.txt`` file holds plain texts, one per line. A folder with
    ``corpus``, ``queries`` and ``qrels`` is a retrieval task.

    Args:
        source: Source of the files: see :func:`st_reba.data.sources.files_of`.
        columns: Titles of the columns: see :meth:`st_reba.data.columns.Schema.parse`.
        tell: Called with a line that describes the data.
        scored: Whether labels of texts are used for scores. Texts that are alone in their class are then left out, and
            at least two classes must remain. Otherwise labels are ignored, and the texts are plain.
        separator: Separator of the columns: see :meth:`st_reba.data.sources.File.separate`.

    Raises:
        ValueError: If a row is invalid, or the labels leave nothing to score. The message names file and line.
        FileNotFoundError: If the source does not exist.
        OSError: If the source cannot be read.
        ImportError: If a package is missing that reads the source.
    """
    if columns is None and separator is None and (retrieval := _beir_tables(source)) is not None:
        return read_retrieval(*retrieval, tell=tell)
    table = read_table(source, (PAIRS, TRIPLETS, CLASSES, TEXTS), columns, separator=separator)
    schema = table.schema
    if schema is PAIRS:
        return _pairs(table, columns, tell)
    if schema is TRIPLETS:
        triplets = Triplets(*table.values.values())
        tell(f"{source}: {len(triplets):,} triplets; {table.description}.")
        return triplets
    if schema is CLASSES and scored:
        return _classes(table, columns, tell)
    return _texts(table, tell)


def read_pairs(source: str | Path, columns: str | None = None, tell: Tell = lambda line: None) -> Pairs:
    """Read text pairs with scores.

    Arguments and errors are those of :func:`read_data`. A source without pairs raises a ValueError.
    """
    return _pairs(read_table(source, [PAIRS], columns), columns, tell)


def read_retrieval(
    queries: str | Path, corpus: str | Path, qrels: str | Path, tell: Tell = lambda line: None
) -> Retrieval:
    """Read a retrieval task in the layout of BEIR.

    Args:
        queries: Table with the columns ``_id`` and ``text``.
        corpus: Table of documents with the columns ``_id`` and ``text``, and optionally ``title``.
        qrels: Table with the columns ``query-id``, ``corpus-id`` and ``score``, where a score above 0 is relevant.
            Queries without relevant documents are left out.
        tell: Called with a line that describes the data.

    Raises:
        ValueError: If a row is invalid, an identifier is repeated or unknown, or nothing is relevant. The message
            names file and line.
        FileNotFoundError: If a table does not exist.
    """
    texts, documents = _by_identifier(read_table(queries, [QUERIES])), _by_identifier(read_table(corpus, [CORPUS]))
    relevant: dict[str, dict[str, None]] = {query: {} for query in texts}
    table = read_table(qrels, [QRELS])
    for row, (query, document, score) in enumerate(zip(*table.values.values(), strict=True)):
        for name, known, noun, where in ((query, texts, "query", queries), (document, documents, "document", corpus)):
            if name not in known:
                raise ValueError(f'{table.where(row)}: there is no {noun} "{name}" in {where}.')
        # The last judgement counts.
        if score > 0:
            relevant[query][document] = None
        else:
            relevant[query].pop(document, None)
    kept = {query: text for query, text in texts.items() if relevant[query]}
    if not kept:
        raise ValueError(f"{qrels}: no document is relevant, as no score is above 0.")
    task = Retrieval(kept, documents, {query: tuple(relevant[query]) for query in kept})
    lacking, judged = len(texts) - len(kept), sum(map(len, task.relevant.values()))
    left_out = f"; left out, without relevant documents: {lacking:,} of {len(texts):,} queries" if lacking else ""
    counts = f"{len(kept):,} queries, {len(documents):,} documents, {judged:,} judged relevant"
    tell(f"{queries}, {corpus}, {qrels}: {counts}{left_out}.")
    return task


def _by_identifier(table: Table) -> dict[str, str]:
    titles = table.values.get("title") or [""] * len(table.places)
    texts: dict[str, str] = {}
    for row, (name, title, text) in enumerate(zip(table.values["_id"], titles, table.values["text"], strict=True)):
        if name in texts:
            kind = table.schema.name
            raise ValueError(f'{table.where(row)}: "{name}" is repeated: give each of the {kind} its own _id.')
        texts[name] = f"{title} {text}".strip()
    return texts


def _beir_tables(source: str | Path) -> tuple[Path, Path, Path] | None:
    """Return the three tables of a folder in the layout of BEIR, or None for other sources."""
    if is_remote(source) or not Path(source).is_dir():
        return None
    paths = {path.name.partition(".")[0]: path for path in sorted(Path(source).iterdir())}
    if not {"queries", "corpus", "qrels"} <= paths.keys():
        return None
    return paths["queries"], paths["corpus"], paths["qrels"]


def _texts(table: Table, tell: Tell) -> list[str]:
    """Return plain texts, and describe them."""
    texts = [text.strip() for text in table.values["text"]]
    description = f"read without labels; {table.description}"
    if table.places[0][0].kind == "txt":
        description = "one a line"
        if tabs := [row for row, text in enumerate(texts) if "\t" in text]:
            problem = f"{table.where(tabs[0])}: has a tab, and plain texts have none."
            raise ValueError(f"{problem} If tabs separate columns, end the name of the file in .tsv.")
    if (different := len(set(texts))) < LEAST_TEXTS:
        raise ValueError(f"{table.name}: {different} different texts. Give at least {LEAST_TEXTS}.")
    tell(f"{table.name}: {len(texts):,} plain texts, {description}.")
    return texts


def _pairs(table: Table, columns: str | None, tell: Tell) -> Pairs:
    first, second, scores = table.values.values()
    pairs = Pairs(first, second, scores)
    if len(different := set(pairs.scores)) < 2:
        raise ValueError(f"{table.name}: all {len(pairs)} pairs have one score. Give at least two different scores.")
    titles = list(table.titles.values())
    inference = (titles[0].strip().lower(), titles[2].strip().lower()) in (("premise", "label"), ("premise", "labels"))
    if columns is None and inference and different <= {-1.0, 0.0, 1.0, 2.0}:
        problem = f"{table.name}: {titles[2]} seems to number the classes of inference, and is no score of similarity."
        raise ValueError(f"{problem} Give scores, or read it as one with --columns {','.join(titles)}.")
    least, most = min(different), max(different)
    labels = f"with scores from {least:g} to {most:g}"
    if pairs.two_classes:
        similar = pairs.scores.count(most)
        labels = f"in two classes, {similar:,} similar ({most:g}) and {len(pairs) - similar:,} not ({least:g})"
    tell(f"{table.name}: {len(pairs):,} pairs {labels}; {table.description}.")
    return pairs


def _classes(table: Table, columns: str | None, tell: Tell) -> Classes:
    """Return the texts that share their label with another text, which a nearest neighbour could have."""
    labels: dict[str, str] = {}
    repeated = relabelled = 0
    for text, label in zip(*table.values.values(), strict=True):
        # A repeated text counts once, as it would be its own nearest neighbour.
        repeated += text in labels
        relabelled += labels.setdefault(text, label) != label
    sizes = Counter(labels.values())
    classes = Classes({text: label for text, label in labels.items() if sizes[label] > 1})
    remedy = (
        "Pairs need a third column, their score. --columns TEXT,LABEL reads texts with labels, --columns TEXT plain "
        "texts, by the names or positions of columns."
    )
    first = table.values["label"][0]
    if table.unsure and columns is None and sizes[first] == 1 < max(sizes.values()):
        raise ValueError(
            f'{table.where(0)}: no other text has the label "{first}", so this line may name the columns. {remedy}'
        )
    if (count := sum(size > 1 for size in sizes.values())) < 2:
        raise ValueError(
            f"{table.name}: {count} of {len(sizes):,} labels have two texts or more; two are needed. {remedy}"
        )
    left_out = f"; left out, as repeated texts: {repeated:,}, {relabelled:,} with another label" if repeated else ""
    if lonely := len(labels) - len(classes):
        left_out += f"; left out, for no other text has their label: {lonely:,}"
    tell(f"{table.name}: {len(classes):,} texts in {count:,} classes{left_out}; {table.description}.")
    return classes
