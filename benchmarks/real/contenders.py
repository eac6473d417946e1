"""Models that find documents, and BM25, which needs none."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from sentence_transformers import SparseEncoder

from st_reba import build
from st_reba.data.tables import Retrieval
from st_reba.evaluation.rankings import Hits
from st_reba.evaluation.tasks import RetrievalTask
from st_reba.export import static_model
from st_reba.modules import CausalModule, PromptRepsModule
from st_reba.modules.multi_vector import multi_vector_encoder
from st_reba.recipes import find
from st_reba.text.presets import language_of, preset

#: Recipe, pooling and filter, as tables have them.
Key = tuple[str, str, str]
#: Makes a model of a loaded backbone, fitted on some documents.
Make = Callable[[CausalModule, Sequence[str]], Any]


def best(scores: np.ndarray, count: int) -> list[Hits]:
    """Return the highest scores of each row of (Q, N); of equal ones those with the lower index."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return [[(int(index), float(own[index])) for index in indices] for own, indices in zip(scores, order, strict=True)]


def words(text: str, language: str) -> list[str]:
    """Return the terms that BM25 counts: words; of Chinese, characters and pairs of neighbours."""
    runs = re.findall(r"\w+", text.lower())
    if language == "en":
        return runs
    return [run[index : index + size] for run in runs for size in (1, 2) for index in range(len(run) - size + 1)]


def bm25(queries: Sequence[str], documents: Sequence[str], language: str, count: int) -> list[Hits]:
    """Rank by the library bm25s, with k1 = 1.2 and b = 0.75, over whole documents."""
    from bm25s import BM25

    index = BM25(k1=1.2, b=0.75)
    index.index([words(text, language) for text in documents], show_progress=False)
    asked = [words(text, language) for text in queries]
    return best(np.stack([index.get_scores(own) if own else np.zeros(len(documents)) for own in asked]), count)


def of_queries(data: Retrieval, ranked: Sequence[Hits]) -> dict[str, np.ndarray]:
    """Return the scores of each query by metric, of rankings that are there already."""
    own = SimpleNamespace(nearest=lambda queries, documents, count: ranked)
    return {name: np.asarray(values) for name, values in RetrievalTask(data).measure(cast(Any, own)).items()}


def recipe(key: str) -> tuple[Key, Make]:
    """Return a recipe, which asks in the language of the documents."""
    own = find(key)
    name = (own.row.name, own.pooling, "" if own.post_processor is None else own.post_processor.name)
    return name, lambda backbone, documents: build(backbone, key, documents)


def sparse(backbone: CausalModule, documents: Sequence[str]) -> SparseEncoder:
    """Return PromptReps' weights of words."""
    template = "promptreps-zh" if language_of(documents) == "zh" else "promptreps"
    module, prompts = PromptRepsModule(backbone, template=template), dict(preset(template).prompts)
    return SparseEncoder(modules=[module], device=str(backbone.model.device), prompts=prompts)


def late_interaction(key: str, backbone: CausalModule, documents: Sequence[str]) -> Any:
    """Return a row of the recipes as a model of token vectors."""
    return multi_vector_encoder(find(key).build(backbone), dimension=128, fit_texts=documents)


PLAIN = ("classical", "echo-2", "reba-2", "prompteol", "promptreps")
CONTENDERS: dict[Key, Make] = {
    **dict(recipe(key + filtered) for key in PLAIN for filtered in ("", "+whitened")),
    **dict(map(recipe, ("early-late", "topic", "echo-topic"))),
    ("PromptReps, sparse", "", ""): sparse,
    ("Classical, late interaction", "", ""): partial(late_interaction, "classical"),
    ("Echo-2, late interaction", "", ""): partial(late_interaction, "echo-2"),
    ("Static", "", ""): static_model,
}
