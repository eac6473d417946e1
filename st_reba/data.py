"""Texts to measure on: the user's own, labelled or not, and those that ship inside the package."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from .files import check_file

_ASSETS = Path(__file__).parent / "assets"

#: The small bilingual language model that makes everything run offline. For demonstrations only: see its README.md.
DEMO_MODEL = _ASSETS / "demo_lm"

#: Those of the labelled texts in the package: how they were made stands in assets/demo_texts.md.
Language = Literal["en", "zh"]

#: Fewer different texts than this have no spread to measure.
LEAST_TEXTS = 3


def demo_pairs(language: Language) -> Path:
    """The package's sentence pairs in a language, scored from 0 to 5."""
    return _ASSETS / f"demo_pairs_{language}.tsv"


def demo_questions(language: Language) -> Path:
    """The package's word-sense questions in a language."""
    return _ASSETS / f"demo_odd_one_out_{language}.csv"


#: What is measured on where nothing else is asked for.
DEMO_PAIRS = demo_pairs("en")
DEMO_QUESTIONS = demo_questions("en")


@dataclass(frozen=True)
class Pairs:
    """Sentence pairs with a graded similarity; the three lists are equally long."""

    first: list[str]
    second: list[str]
    scores: list[float]

    def __len__(self) -> int:
        return len(self.scores)

    def texts(self) -> list[str]:
        """Every text once, in order of appearance."""
        return list(dict.fromkeys([*self.first, *self.second]))


def read_data(path: str | Path) -> Pairs | list[str]:
    """Read labelled pairs or plain texts, whichever a file holds.

    A file without any tab holds texts (:func:`read_texts`); one whose first line has tabs holds pairs
    (:func:`read_pairs`).

    Raises:
        ValueError: If the file is neither, naming the first line that does not fit; or a directory.
        FileNotFoundError: If there is no such file.
    """
    lines = list(_lines(path))
    tabbed = [number for number, line in lines if "\t" in line]
    if not tabbed:
        return _texts(path, lines)
    first, _ = lines[0]
    if tabbed[0] != first:
        raise ValueError(
            f"{path}, line {tabbed[0]}: has tabs, but line {first} has none. Give plain texts, one a line and without "
            "tabs, or labelled pairs, each line two texts and a score, separated by tabs."
        )
    return _pairs(path, lines)


def read_texts(path: str | Path) -> list[str]:
    """Read plain texts, one a line, UTF-8. Empty lines are passed over; a text that stands twice is read twice.

    Raises:
        ValueError: If a line has a tab, or is not UTF-8, naming it; or if there are fewer than three different texts.
        FileNotFoundError: If there is no such file.
    """
    return _texts(path, _lines(path))


def read_pairs(path: str | Path) -> Pairs:
    """Read ``text <TAB> text <TAB> score`` lines, UTF-8. Empty lines are passed over.

    Raises:
        ValueError: If a line is malformed, naming it; or if the scores leave nothing to correlate with.
        FileNotFoundError: If there is no such file.
    """
    return _pairs(path, _lines(path))


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, and their numbers."""
    check_file(Path(path))
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from None
        if text:
            yield number, text


def _texts(path: str | Path, lines: Iterable[tuple[int, str]]) -> list[str]:
    texts = []
    for number, line in lines:
        if "\t" in line:
            raise ValueError(f"{path}, line {number}: has a tab. Plain texts stand one a line, without tabs.")
        if line.strip():
            texts.append(line.strip())
    if (different := len(set(texts))) < LEAST_TEXTS:
        raise ValueError(f"{path}: {different} different texts, one a line; at least {LEAST_TEXTS} are needed.")
    return texts


def _pairs(path: str | Path, lines: Iterable[tuple[int, str]]) -> Pairs:
    first, second, scores = [], [], []
    for number, line in lines:
        fields = line.split("\t")
        where = f"{path}, line {number}"
        if len(fields) != 3:
            raise ValueError(f"{where}: {len(fields)} fields, but a line is two texts and a score, separated by tabs.")
        if not fields[0].strip() or not fields[1].strip():
            raise ValueError(f"{where}: an empty text. A line is two texts and a score, separated by tabs.")
        try:
            score = float(fields[2])
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise ValueError(f"{where}: the score {fields[2]!r} is not a number. A header line must be removed.")
        first.append(fields[0])
        second.append(fields[1])
        scores.append(score)
    if len(set(scores)) < 2:
        raise ValueError(f"{path}: {len(scores)} pairs with {len(set(scores))} different scores leave nothing to rank.")
    return Pairs(first, second, scores)


def demo_sentences(language: Language | None = None) -> list[str]:
    """The sentences of the package's word-sense questions, each once: plain texts to fit something small on.

    Args:
        language: Theirs; both if None.
    """
    sentences: dict[str, None] = {}
    for each in get_args(Language) if language is None else (language,):
        with demo_questions(each).open(encoding="utf-8-sig", newline="") as file:
            sentences |= dict.fromkeys(row[f"选项{number}"] for row in csv.DictReader(file) for number in range(1, 5))
    return list(sentences)
