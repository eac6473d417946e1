"""Rankings of documents by models, and their fusion.

A ranker has ``nearest``, as :class:`st_reba.evaluation.tasks.Similarity` has it::

    data = read_data("folder-in-the-layout-of-beir")
    dense, sparse = ByModel(SentenceTransformer("dense")), ByModel(SparseEncoder("sparse"))
    scored(data, {"dense": dense, "sparse": sparse, "hybrid": Fusion([dense, sparse])})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder
from torch import Tensor

from ..data.tables import Retrieval
from . import bootstrap
from .bootstrap import Estimate
from .tasks import Ranker, RetrievalTask

#: What a ranking counts for by its documents' ranks: the constant of the authors of reciprocal rank fusion.
FUSION_CONSTANT = 60

#: Documents of each ranking that are fused, and queries that are held against all documents at a time.
_FUSED = 100
_TOGETHER = 64

#: For one query the documents that were found, the best first: their indices and scores.
Hits = list[tuple[int, float]]


def fused(rankings: Sequence[Sequence[tuple[int, float]]], constant: int = FUSION_CONSTANT) -> Hits:
    r"""Several rankings of one query as one, by reciprocal rank fusion.

    .. math:: s(d) = \sum_r \frac{1}{c + r(d)}

    over the rankings that have document d, with its rank r(d) there, from 1 (Cormack, Clarke and Buettcher: Reciprocal
    Rank Fusion Outperforms Condorcet and Individual Rank Learning Methods. SIGIR 2009). Scores are not looked at, so
    that those of different kinds need not be comparable. Of equals that which an earlier ranking has first stands
    first.

    Args:
        rankings: Each the documents that were found, the best first: their indices and scores.
        constant: c, 1 or more: the larger it is, the less the first ranks stand out.

    Raises:
        ValueError: If ``constant`` is less than 1.
    """
    if constant < 1:
        raise ValueError(f"constant={constant}: give 1 or more; {FUSION_CONSTANT} is usual.")
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (document, _) in enumerate(ranking, start=1):
            scores[document] = scores.get(document, 0.0) + 1 / (constant + rank)
    return sorted(scores.items(), key=lambda hit: -hit[1])


class ByModel:
    """Documents ranked by any model of sentence-transformers that embeds: dense, sparse or with a vector a token.

    Queries are embedded by ``encode_query`` and documents by ``encode_document``, and held against each other by the
    model's own ``similarity``. The documents that were asked for last are kept, so that they are embedded once.

    Args:
        model: A ``SentenceTransformer``, a ``SparseEncoder`` or a ``MultiVectorEncoder``.
        batch_size: Texts at a time.
    """

    def __init__(self, model: Any, batch_size: int = 32) -> None:
        self.model = model
        self.batch_size = batch_size
        self._documents: tuple[list[str], Any] = ([], None)

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[Hits]:
        """For each query the documents of the highest similarity, at most so many: their indices and similarities."""
        if list(documents) != self._documents[0]:
            self._documents = list(documents), self._embedded(self.model.encode_document, documents)
        found: list[Hits] = []
        for first in range(0, len(queries), _TOGETHER):
            asked = self._embedded(self.model.encode_query, queries[first : first + _TOGETHER])
            found += _best(self.model.similarity(asked, self._documents[1]), count)
        return found

    def _embedded(self, encode: Any, texts: Sequence[str]) -> Any:
        # MultiVectorEncoder returns tensors by default, and knows no such argument.
        as_tensor = {} if isinstance(self.model, MultiVectorEncoder) else {"convert_to_tensor": True}
        return encode(list(texts), batch_size=self.batch_size, show_progress_bar=False, **as_tensor)


@dataclass(frozen=True)
class Fusion:
    """Several rankings as one: see :func:`fused`.

    Attributes:
        rankers: What gives them.
        constant: As for :func:`fused`.
        depth: Documents of each that count.
    """

    rankers: Sequence[Ranker]
    constant: int = FUSION_CONSTANT
    depth: int = _FUSED

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[Hits]:
        """For each query the documents that come first in all rankings together, at most so many."""
        found = [ranker.nearest(queries, documents, max(count, self.depth)) for ranker in self.rankers]
        return [
            fused([own[: self.depth] for own in rankings], self.constant)[:count]
            for rankings in zip(*found, strict=True)
        ]


@dataclass(frozen=True)
class RetrievalScores:
    """How well documents are ranked, with intervals over queries.

    Attributes:
        ndcg: nDCG@10.
        recall: Recall@100.
    """

    ndcg: Estimate
    recall: Estimate


def scored(data: Retrieval, rankers: Mapping[str, Ranker]) -> dict[str, RetrievalScores]:
    """nDCG@10 and recall@100 of several rankings of the same documents, on the same resamples of the queries.

    Args:
        data: The task; a folder in BEIR's layout is read by :func:`st_reba.data.tables.read_data`.
        rankers: By what they are called.
    """
    task = RetrievalTask(data)
    with torch.inference_mode():
        measured = {name: task.measure(ranker) for name, ranker in rankers.items()}
    estimates = {
        what: bootstrap.estimate(bootstrap.mean({name: own[what] for name, own in measured.items()}))
        for what in ("ndcg", "recall")
    }
    return {name: RetrievalScores(estimates["ndcg"][name], estimates["recall"][name]) for name in rankers}


def _best(similarities: Tensor, count: int) -> list[Hits]:
    """Of (Q, N) similarities each row's highest, of equals those that stand first."""
    order = similarities.argsort(dim=1, descending=True, stable=True)[:, :count]
    values = similarities.gather(1, order)
    return [list(zip(own.tolist(), scores.tolist(), strict=True)) for own, scores in zip(order, values, strict=True)]
