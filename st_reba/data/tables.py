"""Texts to measure on: the user's own, labelled or not, and those that ship inside the package."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..files import check_file

#: Fewer different texts than this have no spread to measure.
LEAST_TEXTS = 3


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
