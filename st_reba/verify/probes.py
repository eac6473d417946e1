"""Texts in which the faults of servers show."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from sentence_transformers import SentenceTransformer

from ..serve.models import OwnTokenizer
from .readings import text_limit

LONG, EMPTY = "long", "empty"

_SHORT = {
    "word": "Hello",
    "sentence": "The dog chased the cat; the cat chased the mouse, and nobody chased the dog.",
    "Chinese": "我爱自然语言处理。",
    "other marks": "Zwölf Boxkämpfer jagen Viktor 🥊 — naïve café, 3.14 % of {x}",
    EMPTY: "",
}


@dataclass(frozen=True)
class Probe:
    """A text.

    Attributes:
        name: What it is called.
        text: It.
        tokens: Of it, whole.
    """

    name: str
    text: str
    tokens: int


def probes(model: SentenceTransformer, prompt: str | None, max_tokens: int) -> list[Probe]:
    """Short texts, one that is longer than the model reads, and an empty one.

    Args:
        model: Whose tokens count.
        prompt: What stands before each.
        max_tokens: Of the long text, at most.
    """
    limit = text_limit(model, prompt) or max_tokens
    tokens = OwnTokenizer(model.tokenizer)
    texts = {**_SHORT, LONG: _long(tokens, min(limit + limit // 2 + 8, max_tokens))}
    return [Probe(name, text, len(tokens.ids([text])[0])) for name, text in texts.items()]


def _long(tokens: OwnTokenizer, count: int) -> str:
    """A text no part of which is like another, so that it shows where it was cut."""

    def sentences() -> Iterator[str]:
        for number in itertools.count(1):
            yield f"Item {number} weighs {number * 37 % 101} grams and is {'red' if number % 3 else 'blue'}."

    text = ""
    for sentence in sentences():
        if len(tokens.ids([text])[0]) >= count:
            break
        text = f"{text} {sentence}".lstrip()
    return text
