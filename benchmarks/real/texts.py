"""The evaluation sets, as lists of texts to embed. They are public, and no part of this repository."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation import OddOneOutEvaluator

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
