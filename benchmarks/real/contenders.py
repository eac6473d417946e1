"""Models that find documents, and BM25, which needs none."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from torch import Tensor
from torch.nn.functional import normalize

from runs import pooled
from st_reba.data.demo import Language, demo_sentences
from st_reba.evaluation.rankings import ByModel, Hits
from st_reba.export import static_model
from st_reba.modules import CausalModule, CausalTransformer, PromptRepsModule
from st_reba.modules.moments import Moments
from st_reba.modules.multi_vector import DIMENSION, multi_vector_encoder
from st_reba.recipes import Row, find
from st_reba.recipes.rows import PARTS
from st_reba.text.templates import preset

#: Number of texts that are encoded together.
BATCH = 16
#: Number of documents that filters are fitted on, without any label.
FIT_DOCUMENTS = 400


@dataclass(frozen=True)
class Contender:
    """One way to find documents.

    Attributes:
        name: Its name in tables.
        pooling: ``"mean"``, ``"last"``, or empty.
        make: Makes the model from a loaded backbone and a language.
        filters: Filters behind the pooling, each ranked on its own.
    """

    name: str
    pooling: str
    make: Callable[[CausalModule, str], Any]
    filters: tuple[str, ...] = ("",)

    def rank(self, model: Any, queries: Sequence[str], documents: Sequence[str], count: int) -> dict[str, list[Hits]]:
        """Return the best documents of each query, by filter."""
        if self.filters == ("",):
            return {"": ByModel(model, BATCH).nearest(queries, documents, count)}
        sides = [
            encode(list(texts), batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False).float().cpu()
            for encode, texts in ((model.encode_query, queries), (model.encode_document, documents))
        ]
        drawn = random.Random(0).sample(range(len(documents)), min(FIT_DOCUMENTS, len(documents)))
        fit, shares = sides[1][drawn], model[0].shares
        filtered = {name: [normalize(behind(name, each, fit, shares)) for each in sides] for name in self.filters}
        return {name: best((asked @ found.T).numpy(), count) for name, (asked, found) in filtered.items()}


@torch.inference_mode()
def behind(name: str, vectors: Tensor, fit: Tensor, shares: Sequence[float]) -> Tensor:
    """Return vectors behind a filter that is fitted on others."""
    if not name:
        return vectors
    moments = Moments(fit.shape[1], covariance=PARTS[name].needs_covariance)
    moments.add(fit)
    mapped: Tensor = PARTS[name].from_moments(moments, shares)({"sentence_embedding": vectors})["sentence_embedding"]
    return mapped


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


def recipe(key: str, pooling: str = "") -> Contender:
    """Return a row of the recipes, its prompt in the language of the texts; ``pooling`` is the row's own if empty."""
    row: Row = find(key).row
    pooling = pooling or row.poolings[0]

    def make(backbone: CausalModule, language: str) -> SentenceTransformer:
        own = row.in_chinese() if language == "zh" and row.chinese else row
        return pooled(own.build(backbone, pooling), pooling)

    return Contender(row.name, pooling, make, ("", "whitened") if row.around is None else (row.around.name,))


def promptreps() -> Contender:
    """Return the dense half of PromptReps, with the prompts of queries and documents."""

    def make(backbone: CausalModule, language: str) -> SentenceTransformer:
        template = word_prompt(language)
        return pooled(CausalTransformer(backbone, template=template), "last", prompts=preset(template).prompts)

    return Contender("PromptReps", "last", make, ("", "whitened"))


def sparse() -> Contender:
    """Return PromptReps' weights of words."""

    def make(backbone: CausalModule, language: str) -> SparseEncoder:
        module = PromptRepsModule(backbone, template=word_prompt(language))
        prompts = dict(preset(word_prompt(language)).prompts)
        return SparseEncoder(modules=[module], device=str(backbone.model.device), prompts=prompts)

    return Contender("PromptReps, sparse", "", make)


def late_interaction(key: str) -> Contender:
    """Return a row of the recipes as a model of token vectors, projected by the package's own sentences."""
    row: Row = find(key).row

    def make(backbone: CausalModule, language: str) -> Any:
        module = row.build(backbone, "mean")
        return multi_vector_encoder(module, dimension=DIMENSION, fit_texts=demo_sentences(cast(Language, language)))

    return Contender(f"{row.name}, late interaction", "", make)


def static() -> Contender:
    """Return the table of the vocabulary's vectors, at the usual layer."""
    return Contender(
        "Static", "", lambda backbone, language: static_model(backbone, demo_sentences(cast(Language, language)))
    )


def word_prompt(language: str) -> str:
    return "promptreps-zh" if language == "zh" else "promptreps"


#: By name and pooling.
CONTENDERS = {
    ", ".join(filter(None, (each.name, each.pooling))): each
    for each in (
        *(recipe(key, "mean") for key in ("classical", "echo-2", "reba-2")),
        *map(recipe, ("prompteol", "early-late", "topic", "echo-topic")),
        promptreps(),
        sparse(),
        late_interaction("classical"),
        late_interaction("echo-2"),
        static(),
    )
}
