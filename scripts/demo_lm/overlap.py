"""How many texts of evaluation sets share a run of 13 words with the training text; a Chinese character is a word.

    python scripts/demo_lm/overlap.py --corpus DIR FILE [FILE ...]

Each line of a FILE is cut at tabs (and commas, in .csv) into texts. A text shorter than 13 words counts where all of it
stands in the training text as a whole line or between other words.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from prepare import read_corpus

N = 13
WORD = re.compile(r"[\u4e00-\u9fff]|[a-z0-9]+")
SHORTEST = 5  # words; less than that stands everywhere


def words(text: str) -> list[str]:
    """Chinese characters one by one, Latin words and numbers in lower case, nothing else."""
    return WORD.findall(text.lower())


def runs(found: list[str], length: int) -> set[str]:
    """All runs of this length."""
    return {" ".join(found[i : i + length]) for i in range(len(found) - length + 1)}


def overlapping(sets: Mapping[str, Iterable[str]], training: Iterable[str]) -> dict[str, set[str]]:
    """The texts that share a run of 13 words (or all of theirs, if they have fewer) with the training text.

    Args:
        sets: Texts by the name of their set.
        training: Documents, read once.
    """
    owners: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    lengths = set()
    for name, texts in sets.items():
        for text in comparable(texts):
            found = words(text)
            length = min(N, len(found))
            lengths.add(length)
            for run in runs(found, length):
                owners[run].add((name, text))
    shared: dict[str, set[str]] = {name: set() for name in sets}
    for document in training:
        found = words(document)
        for length in lengths:
            for run in owners.keys() & runs(found, length):
                for name, text in owners[run]:
                    shared[name].add(text)
    return shared


def comparable(texts: Iterable[str]) -> set[str]:
    """Those that are long enough to tell anything."""
    return {text for text in texts if len(words(text)) >= SHORTEST}


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
    sets = {path.name: texts_of(path) for path in options.files}
    shared = overlapping(sets, training)
    print("| file | texts | that share 13 words with the training text |\n|---|---|---|")
    for name, texts in sets.items():
        print(f"| {name} | {len(comparable(texts)):,} | {len(shared[name]):,} |")


if __name__ == "__main__":
    main()
