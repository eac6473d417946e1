"""Cosines of pairs of texts, and their scores with intervals. Needs no mteb, as titles of news do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from records import Record
from runs import kept
from st_reba.data import tables
from st_reba.evaluation import bootstrap

Array = NDArray[np.float64]


def cosines_of(vectors: NDArray[np.float32], first: NDArray[np.int64], second: NDArray[np.int64]) -> Array:
    """(pairs,): of the rows that two index arrays name."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms == 0, 1, norms)
    return np.einsum("nd,nd->n", unit[first], unit[second], dtype=np.float64)


def places(pairs: tables.Pairs) -> tuple[list[str], tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Each text once, and where those of both sides stand among them."""
    texts = pairs.texts()
    place = {text: index for index, text in enumerate(texts)}
    first, second = (np.array([place[text] for text in side]) for side in (pairs.first, pairs.second))
    return texts, (first, second)


def pair_cosines(model: SentenceTransformer, pairs: tables.Pairs) -> Array:
    """(pairs,): by a model that embeds each text once."""
    texts, columns = places(pairs)
    vectors = model.encode(texts, show_progress_bar=False, convert_to_tensor=True).float().cpu().numpy()
    return cosines_of(vectors, *columns)


def kept_cosines(
    file: Path, make: Callable[[], SentenceTransformer], sets: Mapping[str, tables.Pairs]
) -> dict[str, Array]:
    """Those of several sets, by a model that is made if they are not there."""

    def made() -> dict[str, Array]:
        model = make()
        return {name: pair_cosines(model, pairs) for name, pairs in sets.items()}

    return kept(file, made)


def scored(scores: Any, indices: Sequence[int], base: Sequence[int] | None = None) -> Record:
    """The mean of some scores with its interval, and how far it is ahead of the mean of others."""
    replicates = bootstrap.bootstrap(scores)
    mean = np.mean([replicates[index] for index in indices], axis=0)
    low, high = bootstrap.interval(mean)
    values = scores.scores
    found: Record = {
        "score": float(np.mean([values[index] for index in indices])), "low": float(low), "high": float(high),
    }  # fmt: skip
    if base is not None:
        other = np.mean([replicates[index] for index in base], axis=0)
        low, high = bootstrap.interval(mean - other)
        ahead = float(np.mean([values[index] for index in indices]) - np.mean([values[index] for index in base]))
        found |= {"ahead": ahead, "ahead_low": float(low), "ahead_high": float(high)}
    return found
