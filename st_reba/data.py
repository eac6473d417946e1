"""Labelled texts: the user's own, and those that ship inside the package."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

_ASSETS = Path(__file__).parent / "assets"

#: The small bilingual language model that makes everything run offline. For demonstrations only: see its README.md.
DEMO_MODEL = _ASSETS / "demo_lm"
DEMO_PAIRS = _ASSETS / "demo_pairs.tsv"
DEMO_QUESTIONS = _ASSETS / "demo_odd_one_out.csv"


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


def read_pairs(path: str | Path) -> Pairs:
    """Read ``text <TAB> text <TAB> score`` lines, UTF-8. Empty lines are passed over.

    Raises:
        ValueError: If a line is malformed, naming it; or if the scores leave nothing to correlate with.
        FileNotFoundError: If there is no such file.
    """
    first, second, scores = [], [], []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        try:
            fields = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r").split("\t")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from None
        if fields == [""]:
            continue
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
