"""What recipes are measured on: the user's own tables and texts, labelled or not, whatever files they come in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeAlias

from .columns import CLASSES, CORPUS, PAIRS, QRELS, QUERIES, TEXTS, TRIPLETS, Table, read_table
from .sources import is_remote

#: Fewer different texts than this have no spread to measure.
LEAST_TEXTS = 3

#: What a table to measure on may hold: the first that its columns fit is taken.
MEASURED = (PAIRS, TRIPLETS, CLASSES, TEXTS)

#: Called with a line that says what was read.
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Pairs:
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

    #: What its items are.
    noun: ClassVar[str] = "pairs"

    def __post_init__(self) -> None:
        if self.two_classes is None:
            object.__setattr__(self, "two_classes", len(set(self.scores)) == 2)

    def __len__(self) -> int:
        return len(self.scores)

    def texts(self) -> list[str]:
        """Every text once, in order of appearance."""
        return list(dict.fromkeys([*self.first, *self.second]))

    def items(self) -> list[tuple[str, ...]]:
        """The texts of each pair."""
        return list(zip(self.first, self.second, strict=True))

    def part(self, indices: Sequence[int]) -> Pairs:
        """Some of the pairs."""
        return Pairs(
            [self.first[index] for index in indices],
            [self.second[index] for index in indices],
            [self.scores[index] for index in indices],
            self.two_classes,
        )

    def head(self, count: int) -> Pairs:
        """The first few."""
        return self.part(range(count))

    @property
    def in_words(self) -> str:
        """How many of what."""
        if not self.two_classes:
            return f"{len(self):,} pairs with scores from {min(self.scores):g} to {max(self.scores):g}"
        alike = max(self.scores)
        positive = sum(score == alike for score in self.scores)
        return (
            f"{len(self):,} pairs in two classes, {positive:,} alike ({alike:g}) and {len(self) - positive:,} not "
            f"({min(self.scores):g})"
        )


@dataclass(frozen=True)
class Triplets:
    """Texts with one that is alike and one that is less so; the three lists are equally long."""

    anchors: list[str]
    positives: list[str]
    negatives: list[str]

    #: What its items are.
    noun: ClassVar[str] = "triplets"

    def __len__(self) -> int:
        return len(self.anchors)

    def texts(self) -> list[str]:
        """Every text once, in order of appearance."""
        return list(dict.fromkeys([*self.anchors, *self.positives, *self.negatives]))

    def items(self) -> list[tuple[str, ...]]:
        """The texts of each triplet."""
        return list(zip(self.anchors, self.positives, self.negatives, strict=True))

    def part(self, indices: Sequence[int]) -> Triplets:
        """Some of the triplets."""
        sides = (self.anchors, self.positives, self.negatives)
        return Triplets(*([side[index] for index in indices] for side in sides))

    def head(self, count: int) -> Triplets:
        """The first few."""
        return self.part(range(count))

    @property
    def in_words(self) -> str:
        """How many of what."""
        return f"{len(self):,} triplets"


@dataclass(frozen=True)
class Retrieval:
    """Queries, and which of many documents are relevant to each.

    Attributes:
        queries: By their identifiers; each has something relevant.
        documents: By theirs; a title stands before the text.
        relevant: By the queries' identifiers, those of documents, in order.
        prompts: What stands before a ``"query"`` and before a ``"document"`` when it is embedded.
    """

    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, tuple[str, ...]]
    prompts: Mapping[str, str] = field(default_factory=dict)

    #: What its items are.
    noun: ClassVar[str] = "queries"

    def __len__(self) -> int:
        return len(self.queries)

    def texts(self) -> list[str]:
        """Every text once, the queries first."""
        return list(dict.fromkeys([*self.queries.values(), *self.documents.values()]))

    def items(self) -> list[tuple[str, ...]]:
        """The text of each query. The documents belong to all of them."""
        return [(text,) for text in self.queries.values()]

    def part(self, indices: Sequence[int]) -> Retrieval:
        """Some of the queries, among all documents."""
        names = list(self.queries)
        chosen = [names[index] for index in indices]
        return Retrieval(
            {name: self.queries[name] for name in chosen},
            self.documents,
            {name: self.relevant[name] for name in chosen},
            self.prompts,
        )

    def head(self, count: int) -> Retrieval:
        """The first few queries, among what is relevant to them and as large a share of the other documents."""
        part = self.part(range(count))
        asked = {name for names in part.relevant.values() for name in names}
        others = [name for name in self.documents if name not in asked]
        random.Random(0).shuffle(others)
        kept = asked.union(others[: len(others) * count // len(self)])
        documents = {name: text for name, text in self.documents.items() if name in kept}
        return Retrieval(part.queries, documents, part.relevant, self.prompts)

    @property
    def in_words(self) -> str:
        """How many of what."""
        judged = sum(map(len, self.relevant.values()))
        return f"{len(self):,} queries, {len(self.documents):,} documents, {judged:,} judged relevant"


@dataclass(frozen=True)
class Classes:
    """Texts, each of one class.

    Attributes:
        labels: By the text, the name of its class.
    """

    labels: dict[str, str]

    #: What its items are.
    noun: ClassVar[str] = "texts"

    def __len__(self) -> int:
        return len(self.labels)

    def texts(self) -> list[str]:
        """Every text, in order."""
        return list(self.labels)

    def items(self) -> list[tuple[str, ...]]:
        """Each text."""
        return [(text,) for text in self.labels]

    def part(self, indices: Sequence[int]) -> Classes:
        """Some of the texts."""
        items = list(self.labels.items())
        return Classes(dict(items[index] for index in indices))

    def head(self, count: int) -> Classes:
        """The first few."""
        return self.part(range(count))

    @property
    def in_words(self) -> str:
        """How many of what."""
        return f"{len(self):,} texts in {len(set(self.labels.values())):,} classes"


#: What has labels.
Labelled: TypeAlias = Pairs | Triplets | Retrieval | Classes
#: What recipes are measured on; plain texts have no labels.
Data: TypeAlias = Labelled | list[str]


def _quietly(line: str) -> None:
    """Default callback: does nothing."""


def read_data(source: str | Path, columns: str | None = None, tell: Tell = _quietly, *, scored: bool = True) -> Data:
    """Read pairs, triplets, a retrieval task, texts with labels or plain texts, whichever a source holds.

    A table is told by the names of its columns; without a header, rows of two texts and a number are pairs, and rows of
    two columns a text and its label. A file that ends in ``.txt``, or in nothing known, holds rows where its first line
    has tabs, and else plain texts. A folder with ``corpus``, ``queries`` and ``qrels`` is a retrieval task.

    Args:
        source: As for :func:`st_reba.data.sources.files_of`.
        columns: What the columns are called: see :meth:`st_reba.data.columns.Schema.asked`.
        tell: Called with a line that says what was read.
        scored: Whether the labels of texts are to score by: texts that are alone in their class are left out then, and
            two classes must be left. Else such texts are plain ones, whatever their labels.

    Raises:
        ValueError: If a row does not fit, naming file and line; or if the labels leave nothing to score.
        FileNotFoundError: If there is nothing of that name.
        OSError: If it cannot be read.
        ImportError: If a package is missing that reads it.
    """
    if columns is None and (retrieval := _in_layout_of_beir(source)) is not None:
        return read_retrieval(*retrieval, tell=tell)
    table = read_table(source, MEASURED, columns)
    if table.header.schema is PAIRS:
        return _pairs(table, columns, tell)
    if table.header.schema is CLASSES:
        return _classes(table, columns, tell) if scored else _texts(table, tell)
    if table.header.schema is TEXTS:
        return _texts(table, tell, or_labels=columns is None)
    triplets = Triplets(*table.values.values())
    tell(f"{source}: {triplets.in_words}; {table.in_words}.")
    return triplets


def read_texts(source: str | Path, columns: str | None = None, tell: Tell = _quietly) -> list[str]:
    """Read plain texts: one a line, or the column ``text`` of a table. Empty ones are passed over.

    Args and errors as for :func:`read_data`; a text that stands twice is read twice. Fewer than three different texts
    are refused, and so are tabs in a file without columns.
    """
    return _texts(read_table(source, [TEXTS], columns), tell)


def read_pairs(source: str | Path, columns: str | None = None, tell: Tell = _quietly) -> Pairs:
    """Read pairs of texts with a score.

    Args and errors as for :func:`read_data`; what holds no pairs is refused.
    """
    return _pairs(read_table(source, [PAIRS], columns), columns, tell)


def read_retrieval(
    queries: str | Path,
    corpus: str | Path,
    qrels: str | Path,
    prompts: Mapping[str, str] | None = None,
    tell: Tell = _quietly,
) -> Retrieval:
    """Read a retrieval task, in the layout of BEIR.

    Args:
        queries: With the columns ``_id`` and ``text``.
        corpus: The documents, with ``_id`` and ``text``, and ``title`` where there are titles.
        qrels: With ``query-id``, ``corpus-id`` and ``score``; above 0 is relevant. Queries without anything relevant
            are left out.
        prompts: As :attr:`Retrieval.prompts`.
        tell: Called with a line that says what was read.

    Raises:
        ValueError: If a row does not fit, naming file and line; or if an identifier stands twice, or a judgement is of
            a query or a document that is not there; or nothing is relevant.
        FileNotFoundError: If there is nothing of one of these names.
    """
    asked = _by_identifier(read_table(queries, [QUERIES]))
    documents = _by_identifier(read_table(corpus, [CORPUS]))
    relevant: dict[str, dict[str, None]] = {}
    judgements = read_table(qrels, [QRELS])
    for row, (query, document, score) in enumerate(zip(*judgements.values.values(), strict=True)):
        for name, there, what, where in ((query, asked, "query", queries), (document, documents, "document", corpus)):
            if name not in there:
                raise ValueError(f'{judgements.where(row)}: there is no {what} "{name}" in {where}.')
        judged = relevant.setdefault(query, {})
        if score > 0:
            judged[document] = None
        else:
            # The last judgement counts.
            judged.pop(document, None)
    if not any(relevant.values()):
        raise ValueError(f"{qrels}: nothing is relevant: no score is above 0.")
    kept = {name: text for name, text in asked.items() if relevant.get(name)}
    found = Retrieval(kept, documents, {query: tuple(relevant[query]) for query in kept}, prompts or {})
    alone = len(asked) - len(kept)
    left = f"; left out, for nothing is relevant to them: {alone:,} of {len(asked):,} queries" if alone else ""
    tell(f"{queries}, {corpus}, {qrels}: {found.in_words}{left}.")
    return found


def _by_identifier(table: Table) -> dict[str, str]:
    titles = table.values.get("title") or [""] * len(table)
    found: dict[str, str] = {}
    for row, (name, title, text) in enumerate(zip(table.values["_id"], titles, table.values["text"], strict=True)):
        if name in found:
            raise ValueError(
                f'{table.where(row)}: "{name}" stands twice: give each of the {table.header.schema.name} an _id.'
            )
        found[name] = f"{title} {text}".strip()
    return found


def _in_layout_of_beir(source: str | Path) -> tuple[Path, Path, Path] | None:
    """The three tables in a folder, if it is one of BEIR's."""
    if is_remote(source) or not Path(source).is_dir():
        return None
    folder = Path(source)
    names = {path.name.partition(".")[0]: path for path in sorted(folder.iterdir()) if not path.name.startswith(".")}
    if not {"queries", "corpus", "qrels"} <= names.keys():
        return None
    return names["queries"], names["corpus"], names["qrels"]


def _texts(table: Table, tell: Tell, or_labels: bool = False) -> list[str]:
    """Plain texts; ``or_labels``: tell how another column would be read as their labels."""
    texts = [text.strip() for text in table.values["text"]]
    one_a_line = table.places[0][0].kind in ("", "txt") and table.header.unsure
    tabs = next((row for row, text in enumerate(texts) if "\t" in text), None)
    if one_a_line and tabs is not None:
        before = f", but line {table.places[0][1]} has none" if tabs else ""
        raise ValueError(
            f"{table.where(tabs)}: has a tab{before}. Plain texts stand one a line, without tabs; labelled pairs are "
            "two texts and a score on each line, separated by tabs."
        )
    if (different := len(set(texts))) < LEAST_TEXTS:
        raise ValueError(f"{table.name}: {different} different texts; at least {LEAST_TEXTS} are needed.")
    how = "one a line" if one_a_line else f"read without labels; {table.in_words}"
    if or_labels and table.header.unread:
        how += f" (--columns {table.header.titles['text']},NAME reads the column NAME as labels)"
    tell(f"{table.name}: {len(texts):,} plain texts, {how}.")
    return texts


def _pairs(table: Table, columns: str | None, tell: Tell) -> Pairs:
    first, second, scores = table.values.values()
    pairs = Pairs(first, second, scores)
    if (different := len(set(pairs.scores))) < 2:
        raise ValueError(f"{table.name}: {len(pairs)} pairs with {different} different scores leave nothing to rank.")
    _check_order(table, pairs, columns)
    tell(f"{table.name}: {pairs.in_words}; {table.in_words}.")
    return pairs


def _classes(table: Table, columns: str | None, tell: Tell) -> Classes:
    """The texts that share their label with another one: no neighbour tells the class of a text that is alone in it."""
    every: dict[str, str] = {}
    for text, own in zip(*table.values.values(), strict=True):
        # What stands again counts once: it would be its own neighbour.
        every.setdefault(text, own)
    sizes = Counter(every.values())
    title, other = (table.header.titles[column.name] for column in CLASSES.columns)
    remedy = (
        "Two columns are a text and its label; pairs have a third one, their score. "
        f"--columns {title},{other} says which is the text, which the label; --columns {title} reads plain texts."
    )
    label = table.values["label"][0]
    if len(sizes) < 2:
        raise ValueError(f'{table.name}: all texts have the label "{label}"; two classes are needed. {remedy}')
    if table.header.unsure and columns is None and sizes[label] == 1 < max(sizes.values()):
        raise ValueError(
            f'{table.where(0)}: no other text has the label "{label}". Does this line name the columns? {remedy}'
        )
    classes = Classes({text: own for text, own in every.items() if sizes[own] > 1})
    if (found := len(set(classes.labels.values()))) < 2:
        raise ValueError(
            f"{table.name}: labels that two texts or more have: {found} of {len(sizes):,}; two are needed. {remedy}"
        )
    left = ""
    if again := len(table) - len(every):
        others = sum(every[text] != own for text, own in zip(*table.values.values(), strict=True))
        left = f"; left out, for the same text stands before: {again:,}, {others:,} with another label"
    if alone := len(every) - len(classes):
        left += f"; left out, for no other text has their label: {alone:,}"
    tell(f"{table.name}: {classes.in_words}{left}; {table.in_words}.")
    return classes


def _check_order(table: Table, pairs: Pairs, columns: str | None) -> None:
    """Refuse classes of inference, whose numbers are in no order: 0 is often the one that is most alike."""
    title = table.header.titles.get("score", "").strip().lower()
    inference = table.header.titles.get("sentence1", "").strip().lower() == "premise" and title in ("label", "labels")
    if columns is None and inference and set(pairs.scores) <= {-1.0, 0.0, 1.0, 2.0}:
        raise ValueError(
            f"{table.name}: {title} numbers the classes of inference, of which 0 often is entailment: a higher number "
            "is not more alike. Make a score of it that is; or, if it is one, say so: --columns "
            f"{','.join(table.header.titles[column.name] for column in PAIRS.columns)}."
        )
