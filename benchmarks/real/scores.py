"""Scores of kept vectors: rows of ``benchmarks/results/scores.csv``."""

from __future__ import annotations

from collections.abc import Iterator
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


def pair_rows(kept: Kept, language: str, part: str, tokens: CausalModule) -> Iterator[Row]:
    """Yield a row for each reading of the pairs of one part, and for tf-idf, with its interval."""
    sets = kept.sets
    labelled = sets.pairs(language, part)
    texts, columns = places(labelled)
    cosines = {TF_IDF: TfIdf(tokens, sets.fit_texts(language)).cosines(labelled.first, labelled.second)}
    for variant, vectors in kept.readings(f"stsb-{language}-{part}", f"fit-{language}", tokens):
        cosines[variant] = cosines_of(vectors, *columns)
    sure = bootstrap.spearman({str(number): own for number, own in enumerate(cosines.values())}, labelled.scores)
    for place, variant in enumerate(cosines):
        shared = {"set": sets.pairs_name(language, part), "metric": SPEARMAN, "texts": len(texts)}
        yield {**shared, **variant._asdict(), **beside(sure, [place])}


def word_rows(kept: Kept, name: str) -> Iterator[Row]:
    """Yield the accuracy of the odd one out, by Euclidean and by cosine distance."""
    questions = kept.sets.questions(name)
    found = {
        recipe: questions.correct(vectors.reshape(len(questions.questions), 4, -1))
        for recipe in kept.poolings(LISTS[name])
        if (vectors := kept.vectors(name, recipe)) is not None
    }
    for distance in ("Euclidean", "cosine"):
        correct = {recipe: own[f"{distance.lower()}_accuracy"] for recipe, own in found.items()}
        sure = bootstrap.mean(correct) if correct else None
        for place, (recipe, own) in enumerate(correct.items()):
            shared = {"set": name.upper(), "metric": f"accuracy, {distance}", "texts": 4 * len(own)}
            yield {**shared, **Variant(recipe)._asdict(), **beside(sure, [place])}
