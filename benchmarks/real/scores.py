"""Scores of kept vectors: rows of ``benchmarks/results/scores.csv``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from st_reba.evaluation import bootstrap
from st_reba.evaluation.rankings import TfIdf
from st_reba.modules import CausalModule

from .cosines import beside, cosines_of, places
from .kept import Kept, Variant
from .sets import LISTS

Array = NDArray[np.float64]
Row = dict[str, Any]
TF_IDF = Variant("tf-idf")
SPEARMAN = "Spearman"


@dataclass(frozen=True)
class Pairs:
    """Cosines of the pairs of one part, by every reading of a model.

    Attributes:
        name: Name of the part in tables.
        language: Language of the pairs.
        cosines: (pairs,) by reading.
        labels: Labels of the pairs.
        texts: Number of texts.
    """

    name: str
    language: str
    cosines: dict[Variant, Array]
    labels: list[float]
    texts: int


def pairs(kept: Kept, language: str, part: str, tokens: CausalModule) -> Pairs:
    """Read the pairs of one part by every recipe that was run on them, and by tf-idf."""
    sets = kept.sets
    labelled = sets.pairs(language, part)
    texts, columns = places(labelled)
    cosines = {TF_IDF: TfIdf(tokens, sets.fit_texts(language)).cosines(labelled.first, labelled.second)}
    for variant, vectors in kept.readings(f"stsb-{language}-{part}", f"fit-{language}", tokens):
        cosines[variant] = cosines_of(vectors, *columns)
    return Pairs(sets.pairs_name(language, part), language, cosines, labelled.scores, len(texts))


def pair_rows(found: Pairs) -> Iterator[Row]:
    """Yield a row for each reading, with its interval."""
    sure = bootstrap.spearman({str(number): own for number, own in enumerate(found.cosines.values())}, found.labels)
    for place, variant in enumerate(found.cosines):
        shared = {"set": found.name, "metric": SPEARMAN, "texts": found.texts}
        yield {**shared, **variant._asdict(), **beside(sure, [place])}


def word_readings(kept: Kept, name: str) -> dict[str, dict[Variant, Array]]:
    """Return how far each question is answered right, by distance and recipe."""
    questions = kept.sets.questions(name)
    correct: dict[str, dict[Variant, Array]] = {"Euclidean": {}, "cosine": {}}
    for recipe in kept.poolings(LISTS[name]):
        if (vectors := kept.vectors(name, recipe)) is not None:
            found = questions.correct(vectors.reshape(len(questions.questions), 4, -1))
            for distance, own in correct.items():
                own[Variant(recipe)] = found[f"{distance.lower()}_accuracy"]
    return correct


def word_rows(kept: Kept, name: str) -> Iterator[Row]:
    """Yield the accuracy of the odd one out, by Euclidean and by cosine distance."""
    for distance, scores in word_readings(kept, name).items():
        sure = bootstrap.mean({str(number): each for number, each in enumerate(scores.values())}) if scores else None
        for place, variant in enumerate(scores):
            shared = {"set": name.upper(), "metric": f"accuracy, {distance}", "texts": 4 * len(scores[variant])}
            yield {**shared, **variant._asdict(), **beside(sure, [place])}
