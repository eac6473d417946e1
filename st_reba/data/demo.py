"""The texts that ship inside the package: what runs where nothing else is given."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal, get_args

_ASSETS = Path(__file__).parent.parent / "assets"


#: Those of the labelled texts in the package: how they were made stands in assets/demo_texts.md.
Language = Literal["en", "zh"]


def demo_pairs(language: Language) -> Path:
    """The package's sentence pairs in a language, scored from 0 to 5."""
    return _ASSETS / f"demo_pairs_{language}.tsv"


def demo_retrieval(language: Language) -> Path:
    """The package's queries, documents and judgements in a language: a folder in the layout of BEIR."""
    return _ASSETS / f"demo_retrieval_{language}"


def demo_questions(language: Language) -> Path:
    """The package's word-sense questions in a language."""
    return _ASSETS / f"demo_odd_one_out_{language}.csv"


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
