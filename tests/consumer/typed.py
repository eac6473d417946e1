"""How a program sees the types of st_reba. ``make typed`` has mypy and pyright read it; nothing runs it.

Without ``py.typed``, or without annotations of a public name, an ``assert_type`` fails, and what is ignored below is no
mistake any more: both checkers report an ignore that is not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from st_reba import ReBAModule, WhiteningTransform, encode_words
from st_reba.evaluation import OddOneOutEvaluator


def build(path: str, texts: list[str]) -> SentenceTransformer:
    reba = ReBAModule(path, repetitions=2, rows="last")
    assert_type(reba, ReBAModule)
    assert_type(reba.repetitions, int)
    pooled = SentenceTransformer(modules=[reba, Pooling(reba.get_embedding_dimension(), "lasttoken")])
    whitening = WhiteningTransform.fit(pooled, texts, dimension=8)
    assert_type(whitening, WhiteningTransform)
    return SentenceTransformer(modules=[reba, Pooling(reba.get_embedding_dimension()), whitening, Normalize()])


def read(model: SentenceTransformer, questions: Path) -> None:
    words = encode_words(model, ["I swim in the sea.", "The sea is cold."], ["swim", "cold"])
    assert_type(words, np.ndarray)
    assert_type(OddOneOutEvaluator.from_csv(questions), OddOneOutEvaluator)


def mistakes(path: str, model: SentenceTransformer) -> None:
    ReBAModule(path, repetitions="2")  # type: ignore[arg-type]
    ReBAModule(path, layers="first")  # type: ignore[arg-type]
    WhiteningTransform.fit(path, ["a", "b"], dimension=8)  # type: ignore[arg-type]
    encode_words(model, ["I swim."], ["swim"], batch="32")  # type: ignore[call-arg]
