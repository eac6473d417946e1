"""How many texts of evaluation sets share a run of 13 words with the training text; a Chinese character is a word.

    python scripts/demo_lm/overlap.py --corpus DIR FILE [FILE ...]

Each line of a FILE is cut at tabs (and commas, in .csv) into texts. A text shorter than 13 words counts where all of it
stands in the training text as a whole line or between other words.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from prepare import read_corpus

N = 13
WORD = re.compile(r"[\u4e00-\u9fff]|[a-z0-9]+")
SHORTEST = 5  # words; less than that stands everywhere


def words(text: str) -> list[str]:
    """Chinese characters one by one, Latin words and numbers in lower case, nothing else."""
    return WORD.findall(text.lower())


def runs(found: list[str], length: int) -> Iterator[tuple[str, ...]]:
    """All runs of this length."""
    return (tuple(found[i : i + length]) for i in range(len(found) - length + 1))


def overlapping(texts: Iterable[str], training: Iterable[str]) -> tuple[set[str], int]:
    """The texts that share a run of 13 words (or all of theirs, if they have fewer) with the training text.

    Returns:
        Those texts, and how many there were that could overlap at all.
    """
    owners: dict[tuple[str, ...], set[str]] = {}
    checked = 0
    for text in set(texts):
        found = words(text)
        if len(found) < SHORTEST:
            continue
        checked += 1
        for run in runs(found, min(N, len(found))):
            owners.setdefault(run, set()).add(text)
    lengths = sorted({len(run) for run in owners})
    shared: set[str] = set()
    for document in training:
        found = words(document)
        for length in lengths:
            for run in runs(found, length):
                if run in owners:
                    shared |= owners[run]
    return shared, checked


def texts_of(path: Path) -> list[str]:
    """All fields of a file that hold text."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file) if path.suffix == ".csv" else (line.rstrip("\n").split("\t") for line in file)
        return [field for row in rows for field in row if field]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="directory with the training text")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    options = parser.parse_args()
    if missing := [str(path) for path in options.files if not path.is_file()]:
        parser.error(f"{', '.join(missing)} is not a file.")
    try:
        corpus = read_corpus(options.corpus)
    except FileNotFoundError as error:
        parser.error(str(error))
    training = [text for texts in corpus.training.values() for text in texts]
    print("| file | texts | that share 13 words with the training text |\n|---|---|---|")
    for path in options.files:
        shared, checked = overlapping(texts_of(path), training)
        print(f"| {path.name} | {checked:,} | {len(shared):,} |", flush=True)


if __name__ == "__main__":
    main()
