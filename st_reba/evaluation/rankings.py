"""Rankings of documents, and what is made of them: several fused into one, the first of one in another order.

What ranks documents has ``nearest``, as :class:`st_reba.evaluation.tasks.Similarity` has it. It may be a model with
vectors, tokens or words, a fusion of several, or a reranking of another's first::

    data = read_data("folder-in-the-layout-of-beir")
    dense, sparse = ByModel(SentenceTransformer("dense")), ByModel(SparseEncoder("sparse"))
    scored(data, {"dense": dense, "sparse": sparse, "hybrid": Fusion([dense, sparse])})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.tables import Retrieval
from . import bootstrap
from .bootstrap import Estimate
from .tasks import Array, Ranker, RetrievalTask

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
        return encode(list(texts), batch_size=self.batch_size, convert_to_tensor=True, show_progress_bar=False)


@dataclass(frozen=True)
class LateInteraction:
    """Similarity by MaxSim, with which any task of :mod:`.tasks` measures a model that gives each token a vector.

    ``task_of(read_data("cranfield")).measure(LateInteraction(model))`` gives nDCG@10 and recall@100 of each query.
    Queries and documents are encoded by ``encode_query`` and ``encode_document``, behind the model's own prompts; other
    than by :class:`ByModel`, no more than a chunk of documents has its vectors in memory.

    Attributes:
        model: Whose vectors; its own similarity decides between MaxSim and its mean over the tokens of a query.
        batch_size: Texts at a time.
        chunk_size: Documents whose vectors are in memory at a time.
    """

    model: Any
    batch_size: int = 32
    chunk_size: int = 1024

    def cosines(self, first: Sequence[str], second: Sequence[str]) -> Array:
        """Of each text with the one in its place among the others, (B,): the mean MaxSim of both directions.

        It lies between -1 and 1 and is the same whichever text comes first, as a cosine is: neither is a query here.
        """
        sides = [self._encoded(texts, "encode") for texts in (first, second)]
        to, fro = (
            self.model.similarity_pairwise(queries, documents, length_normalize=True)
            for queries, documents in (sides, sides[::-1])
        )
        return np.asarray(((to + fro) / 2).cpu().numpy(), dtype=np.float64)

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[Hits]:
        """For each query the documents that score highest, at most so many: their indices and scores, falling."""
        asked = self._encoded(queries, "encode_query")
        found: list[Hits] = [[] for _ in queries]
        for start in range(0, len(documents), self.chunk_size):
            chunk = self._encoded(documents[start : start + self.chunk_size], "encode_document")
            best = _best(self.model.similarity(asked, chunk).cpu(), count)
            for hits, more in zip(found, best, strict=True):
                hits += [(start + index, score) for index, score in more]
                hits.sort(key=lambda hit: -hit[1])
                del hits[count:]
        return found

    def _encoded(self, texts: Sequence[str], how: str) -> list[Tensor]:
        """(tokens, D) of each text."""
        found: list[Tensor] = getattr(self.model, how)(list(texts), batch_size=self.batch_size, show_progress_bar=False)
        return found


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
class Reranking:
    """The first documents of a ranking in the order that a cross-encoder gives them; behind them the others as before.

    Attributes:
        first: What finds documents.
        model: A ``CrossEncoder``: its ``predict`` scores pairs of a query and a document.
        depth: How many documents of each query it is asked about.
        batch_size: Pairs at a time.
    """

    first: Ranker
    model: Any
    depth: int = 20
    batch_size: int = 32

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[Hits]:
        """For each query the documents, at most so many; a score falls with the rank, and says nothing else."""
        found = self.first.nearest(queries, documents, max(count, self.depth))
        pairs = [
            (query, documents[index])
            for query, hits in zip(queries, found, strict=True)
            for index, _ in hits[: self.depth]
        ]
        scores = iter(self.model.predict(pairs, batch_size=self.batch_size, show_progress_bar=False) if pairs else [])
        return [reranked(hits, [float(next(scores)) for _ in hits[: self.depth]])[:count] for hits in found]


def reranked(hits: Sequence[tuple[int, float]], scores: Sequence[float]) -> Hits:
    """The first documents in the order of new scores, and behind them the others as they were.

    Args:
        hits: Of one query: indices and scores.
        scores: Of as many of the first as were asked about.

    Returns:
        Indices, with scores that fall from one to the next: those of both kinds together would be in no order.
    """
    order = np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable")
    indices = [hits[position][0] for position in order] + [index for index, _ in hits[len(scores) :]]
    return [(index, -float(rank)) for rank, index in enumerate(indices)]


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
