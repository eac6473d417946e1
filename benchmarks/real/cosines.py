"""Cosines of pairs of texts, and their scores with intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
#: A method, and the seed of one training.
Training = tuple[str, int | None]
Statistic = Callable[[Mapping[str, Array], Sequence[float]], bootstrap.Items]
SCORE, AHEAD = ("score", "low", "high"), ("ahead", "ahead_low", "ahead_high")


def cosines_of(vectors: NDArray[np.float32], first: NDArray[np.int64], second: NDArray[np.int64]) -> Array:
    """Return the cosines, (pairs,), of rows at two arrays of indices."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms == 0, 1, norms)
    return np.einsum("nd,nd->n", unit[first], unit[second], dtype=np.float64)


def places(pairs: tables.Pairs) -> tuple[list[str], tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return each text once, and the indices of both sides of the pairs among them."""
    texts = pairs.texts()
    place = {text: index for index, text in enumerate(texts)}
    first, second = (np.array([place[text] for text in side]) for side in (pairs.first, pairs.second))
    return texts, (first, second)


def kept_cosines(file: Path, make: Callable[[], SentenceTransformer], pairs: tables.Pairs) -> Array:
    """Return the cosines of pairs, (pairs,), from a file; if it is missing, ``make`` makes the model that embeds."""

    def made() -> dict[str, Array]:
        texts, columns = places(pairs)
        vectors = make().encode(texts, show_progress_bar=False, convert_to_tensor=True).float().cpu().numpy()
        return {"test": cosines_of(vectors, *columns)}

    found: Array = kept(file, made)["test"]
    return found


def beside(scores: Any, ours: Sequence[int], theirs: Sequence[int] = (), names: Sequence[str] = SCORE) -> Record:
    """Return the mean of some scores, less the mean of others, with its interval.

    Args:
        scores: Object with (M,) ``scores`` and (M, R) ``replicates``.
        ours: Indices of the scores.
        theirs: Indices of the others; empty: none.
        names: Names of the three fields.
    """
    value, drawn = (each[list(ours)].mean(axis=0) for each in (scores.scores, scores.replicates))
    if theirs:
        value = value - scores.scores[list(theirs)].mean()
        drawn = drawn - scores.replicates[list(theirs)].mean(axis=0)
    # Up to a tenth of the replicates may have no score, and are left out.
    ends = np.nanquantile(drawn, [0.025, 0.975]) if np.isnan(drawn).mean() <= 0.1 else ()
    return dict(zip(names, map(float, (value, *ends)), strict=False))


def by_seed(
    found: Mapping[Training, Array], labels: Sequence[float], base: str = "", statistic: Statistic = bootstrap.spearman
) -> Iterator[Record]:
    """Yield the score of each training, and the mean of each method over its seeds.

    Args:
        found: Similarities by method and seed; the seed of a model that was not trained is None.
        labels: Labels of the pairs.
        base: Method that the means of the others are compared with, over the seeds that both have; or a model that was
            not trained.
        statistic: Function from similarities and labels to scores.
    """
    scores = statistic({str(key): own for key, own in found.items()}, labels)
    places: dict[str, dict[int | None, int]] = defaultdict(dict)
    for place, (method, seed) in enumerate(found):
        yield {"method": method, "seed": seed, **beside(scores, [place])}
        places[method][seed] = place
    others = places.get(base, {})
    for method, own in ((method, own) for method, own in places.items() if None not in own):
        row: Record = {"method": method, "seed": None, "seeds": len(own), **beside(scores, list(own.values()))}
        shared = [seed for seed in own if seed in others or None in others]
        if method != base and shared:
            ours, theirs = ([each[seed if seed in each else None] for seed in shared] for each in (own, others))
            row |= {**beside(scores, ours, theirs, AHEAD), "ahead_seeds": len(shared)}
        yield row
