"""Triplets from SNLI's development and test parts, for train_bellm.py.

    python benchmarks/snli.py --snli e-SNLI/dataset/eSNLI --data DIR --out snli.tsv

``--snli`` is a folder as in the e-SNLI repository: s1.dev, s2.dev and labels.dev, and the same of test, a line each. A
triplet is a text, one that it entails and one that contradicts it. ``DIR`` holds stsb_en_dev.tsv and stsb_en_test.tsv;
a triplet that shares a text with them, but for case and punctuation, is left out. The lines hold tokens; the blanks
around punctuation are taken out, for a language model reads texts as people write them.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from real.sets import PARTS, Sets

Triplet = tuple[str, str, str]


def triplets(snli: Path, part: str) -> Iterator[Triplet]:
    """Of each text: its first entailed text and its first contradicting one, its second ones, and so on."""
    columns = [(snli / f"{name}.{part}").read_text(encoding="utf-8").splitlines() for name in ("s1", "s2", "labels")]
    follow: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for text, other, label in zip(*columns, strict=True):
        follow[text.strip()][label.strip()].append(other.strip())
    for text, others in follow.items():
        for entailed, contradicting in zip(others["entailment"], others["contradiction"], strict=False):
            yield text, entailed, contradicting


def written(tokens: str) -> str:
    """As people write it."""
    text = re.sub(r"\s+([.,!?;:%)\]])", r"\1", tokens)
    text = re.sub(r"([(\[$#])\s+", r"\1", text)
    return re.sub(r"\s+('(?:s|re|ve|ll|d|m)\b|n't\b|')", r"\1", text)


def letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snli", type=Path, required=True, help="folder with SNLI's parts")
    parser.add_argument("--data", type=Path, required=True, help="directory with the sets")
    parser.add_argument("--out", type=Path, required=True, help="the file of triplets, tab-separated")
    options = parser.parse_args(arguments)
    held_out = {letters(text) for part in PARTS for text in Sets(options.data).pairs("en", part).texts()}
    every = [triplet for part in PARTS for triplet in triplets(options.snli, part)]
    kept = [triplet for triplet in every if held_out.isdisjoint(map(letters, triplet))]
    lines = ("\t".join(map(written, triplet)) + "\n" for triplet in kept)
    options.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(kept)} of {len(every)} triplets; the others share a text with STS-B.")


if __name__ == "__main__":
    main()
