"""Vectors of a model on lists of texts: computed once, kept in files, and read with and without filters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from runs import kept, pooled
from st_reba.modules import CausalModule, EmbeddingFilter
from st_reba.moments import Moments
from st_reba.reading.words import encode_words
from st_reba.recipes import Row, find
from st_reba.recipes.rows import IDF, POST_PROCESSORS, SUM

from .sets import LISTS, WORD_LISTS, Sets

Array = NDArray[np.float32]

#: Number of texts per batch, and per file.
BATCH, BLOCK = 32, 512
#: Keys of the recipes that are measured.
KEYS = (
    "classical", "echo-2", "reba-1", "reba-2", "reba-2-normalised", "echo-3", "reba-3", "bag-of-input-embeddings",
    "prompteol", "pretended-cot", "knowledge", "topic", "echo-topic", "early-late", "echo-springer", "bidirectional",
    "bidirectional-prompt", "no-sink", "rt-2", "rt-4", "rt-8", "kv-rerouting", "token-prepending", "value-aggregation",
    "contrastive-prompting", "ck", "metaeol",
)  # fmt: skip
#: Recipes with a Chinese prompt for Chinese texts.
TRANSLATED = ("prompteol", "pretended-cot", "knowledge", "topic", "echo-topic", "early-late")
#: PromptEOL with its English prompt on Chinese texts.
IN_ENGLISH = "PromptEOL, English"


class Variant(NamedTuple):
    """One way to read a model: a recipe's name, ``"mean"``, ``"last"`` or no pooling, and a filter."""

    recipe: str
    pooling: str = ""
    filter: str = ""


def recipes(language: str) -> dict[str, Row]:
    """Return the rows of the recipes by name, some with their prompt in the language of the texts."""
    rows = {row.name: row for row in (find(key).row for key in KEYS)}
    if language == "en":
        return rows
    english = rows[find("prompteol").row.name]
    asked = {name: row.in_chinese() if row.key in TRANSLATED else row for name, row in rows.items()}
    return asked | {IN_ENGLISH: english}


@dataclass(frozen=True)
class Kept:
    """All vectors of one model.

    Attributes:
        directory: Directory of the files, which are ``list/recipe/0000.npz`` and so on.
        sets: The evaluation sets.
        load: Loads the language model or the embedder, once.
        embedder: Name of the embedder; empty for a language model.
    """

    directory: Path
    sets: Sets
    load: Callable[[], Any]
    embedder: str = ""

    def poolings(self, language: str) -> dict[str, tuple[str, ...]]:
        """Return the poolings of each recipe."""
        if self.embedder:
            return {self.embedder: ("",)}
        return {name: row.poolings for name, row in recipes(language).items()}

    def model(self, name: str, language: str) -> SentenceTransformer:
        """Return a recipe under all of its poolings, side by side."""
        if self.embedder:
            return self.load()
        row = recipes(language)[name]
        return pooled(row.module(self.load(), **row.settings), *row.poolings)

    def files(self, texts: str, name: str) -> list[Path]:
        count = len(self.sets.texts(texts))
        return [self.directory / texts / name / f"{place:04}.npz" for place in range(-(-count // BLOCK))]

    def embed(self, texts: str, name: str) -> None:
        """Embed a list of texts by a recipe, or one word of each; blocks that are kept are not run again."""
        model, own = cache(partial(self.model, name, LISTS[texts])), self.sets.texts(texts)
        words = self.sets.questions(texts).inputs()[1] if texts in WORD_LISTS else None

        def embedded(block: slice) -> Mapping[str, Any]:
            if words is not None:
                return {"vectors": encode_words(model(), own[block], words[block], batch_size=BATCH)}
            found = model().encode(own[block], batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False)
            return {"vectors": found.float().cpu().numpy()}

        for number, file in enumerate(self.files(texts, name)):
            kept(file, partial(embedded, slice(number * BLOCK, (number + 1) * BLOCK)))

    def vectors(self, texts: str, name: str) -> Array | None:
        """Return what is kept of a list, (texts, poolings x D); None unless that is all of it."""
        files = self.files(texts, name)
        if not all(file.is_file() for file in files):
            return None
        return np.concatenate([np.load(file)["vectors"] for file in files])

    def readings(self, texts: str, fit: str, tokens: CausalModule) -> Iterator[tuple[Variant, Array]]:
        """Yield the vectors of a list by every recipe, pooling and filter that is kept.

        Args:
            texts: The list.
            fit: The list that filters are fitted on.
            tokens: The loaded language model, or the one whose tokens an embedder is compared by.
        """
        for name, poolings in self.poolings(LISTS[texts]).items():
            both = [each for each in (self.vectors(texts, name), self.vectors(fit, name)) if each is not None]
            if len(both) == 2:
                row = None if self.embedder else recipes(LISTS[texts])[name]
                parts = (np.split(each, len(poolings), axis=1) for each in both)
                for pooling, own, seen in zip(poolings, *parts, strict=True):
                    for filtered, vectors in behind_filters(own, seen, row, tokens):
                        yield Variant(name, pooling, filtered), vectors


@torch.inference_mode()
def behind(name: str, vectors: Array, fit: Array, shares: Sequence[float]) -> Array:
    """Return vectors behind a filter that is fitted on others."""
    moments = Moments(fit.shape[1], covariance=POST_PROCESSORS[name].module.NEEDS_COVARIANCE)
    moments.add(torch.from_numpy(fit))
    part = POST_PROCESSORS[name].from_moments(moments, shares)
    mapped: Array = part({"sentence_embedding": torch.from_numpy(vectors)})["sentence_embedding"].numpy()
    return mapped


def behind_filters(own: Array, fit: Array, row: Row | None, tokens: CausalModule) -> Iterator[tuple[str, Array]]:
    """Yield vectors as they are and behind each filter, fitted on others; some recipes have a filter of their own."""
    names: Sequence[str] = ("", *(name for name in POST_PROCESSORS if name not in (IDF, SUM)))
    shares = CausalModule.part_weights
    if row is not None and row.post_processor is not None:
        names, shares = (row.post_processor.name,), find(row.key).build(tokens).part_weights
    yield from (("", own) for name in names if not name)
    for name in filter(None, names):
        if POST_PROCESSORS[name].fitted:
            yield name, behind(name, own, fit, shares)
        elif row is not None:
            with torch.inference_mode():
                filtered = EmbeddingFilter.from_language_model(tokens)({"sentence_embedding": torch.from_numpy(own)})
            yield name, filtered["sentence_embedding"].numpy()
