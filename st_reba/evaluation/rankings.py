"""Rankings of documents by models and by tf-idf, and their fusion.

A ranker is a :class:`st_reba.evaluation.tasks.Ranker`::

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
from sentence_transformers import MultiVectorEncoder
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor

from ..data.tables import Retrieval
from ..modules import CausalModule
from ..reading.words import tokens_of
from . import bootstrap
from .bootstrap import Array, Estimate
from .tasks import Ranker, RetrievalTask

# Constant of the authors of reciprocal rank fusion.
_CONSTANT = 60
# Number of documents of each ranking that are fused, and of queries that are compared at a time.
_FUSED = 100
_TOGETHER = 64

# Texts of the same tokens have equal scores, whatever the order of summation.
_DIGITS = 12

#: Indices and scores of the documents of one query, the best first.
Hits = list[tuple[int, float]]


def fused(rankings: Sequence[Sequence[tuple[int, float]]]) -> Hits:
    r"""Fuse several rankings of one query, by reciprocal rank fusion.

    .. math:: s(d) = \sum_r \frac{1}{60 + r(d)}

    over the rankings that have document d, with its rank r(d) there, from 1 (Cormack, Clarke and Buettcher: Reciprocal
    Rank Fusion Outperforms Condorcet and Individual Rank Learning Methods. SIGIR 2009). Scores do not count, so they
    need not be comparable. Equals are in the order of the first ranking that has them.

    Args:
        rankings: Indices and scores of the documents of each ranking, the best first.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (document, _) in enumerate(ranking, start=1):
            scores[document] = scores.get(document, 0.0) + 1 / (_CONSTANT + rank)
    return sorted(scores.items(), key=lambda hit: -hit[1])


class ByModel:
    """Ranking of documents by any model of sentence-transformers that embeds: dense, sparse or one vector a token.

    ``encode_query`` embeds queries, ``encode_document`` documents, and the model's own ``similarity`` compares them.
    Embeddings of the last documents are kept.

    Args:
        model: A ``SentenceTransformer``, a ``SparseEncoder`` or a ``MultiVectorEncoder``.
        batch_size: Number of texts at a time.
    """

    def __init__(self, model: Any, batch_size: int = 32) -> None:
        self.model = model
        self.batch_size = batch_size
        self._documents: tuple[list[str], Any] = ([], None)

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[Hits]:
        """Return indices and similarities of at most ``count`` documents for each query, the best first."""
        if list(documents) != self._documents[0]:
            self._documents = list(documents), self._embedded(self.model.encode_document, documents)
        hits: list[Hits] = []
        for first in range(0, len(queries), _TOGETHER):
            asked = self._embedded(self.model.encode_query, queries[first : first + _TOGETHER])
            hits += _best(self.model.similarity(asked, self._documents[1]), count)
        return hits

    def _embedded(self, encode: Any, texts: Sequence[str]) -> Any:
        # MultiVectorEncoder returns tensors by default, and has no such argument.
        as_tensor = {} if isinstance(self.model, MultiVectorEncoder) else {"convert_to_tensor": True}
        return encode(list(texts), batch_size=self.batch_size, show_progress_bar=False, **as_tensor)


class TfIdf:
    r"""Cosines of tf-idf vectors of token ids: a :class:`~st_reba.evaluation.tasks.Similarity`.

    .. math:: x_w = tf(w) \, idf(w), \qquad idf(w) = \ln \frac{1 + N}{1 + df(w)} + 1

    tf(w) is how often the text has the token w: plain counts, and the smooth idf, as scikit-learn has them. The vectors
    have as many dimensions as the vocabulary has tokens, nearly all of them 0, and are kept sparse.

    Args:
        backbone: Says what the tokens of a text are; its language model is not run.
        texts: Plain texts that df and their number, N, are counted on.
    """

    def __init__(self, backbone: CausalModule, texts: Sequence[str]) -> None:
        self._backbone = backbone
        vocabulary = range(backbone.lm.vocabulary_size)
        self._vectorizer = TfidfVectorizer(analyzer=list, vocabulary=vocabulary, lowercase=False)
        # Texts without tokens do not count; where there are no others, all tokens count alike.
        self._vectorizer.fit([ids for ids in self._token_ids(texts) if ids] or [[]])

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[Hits]:
        """Return indices and cosines of at most ``count`` documents for each query, the best first."""
        asked, there = self._vectors(queries), self._vectors(documents).T.tocsc()
        hits: list[Hits] = []
        for row in range(asked.shape[0]):
            cosines = np.round((asked[row] @ there).toarray(), _DIGITS)
            hits += _best(torch.from_numpy(cosines), count)
        return hits

    def unit_vectors(self, texts: Sequence[str]) -> Any:
        """Return vectors of length 1, or 0 for a text without tokens, (B, D), sparse, of the tokens that occur."""
        vectors = self._vectors(texts)
        return vectors[:, vectors.getnnz(axis=0) > 0]

    def cosines(self, first: Sequence[str], second: Sequence[str]) -> Array:
        """Return the cosine of each text and the one at its place among the others, (B,); 0 if one has no tokens."""
        products = self._vectors(first).multiply(self._vectors(second))
        return np.round(np.asarray(products.sum(axis=1)).ravel(), _DIGITS)

    def _token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [tokens.ids for tokens in tokens_of(self._backbone, texts)]

    def _vectors(self, texts: Sequence[str]) -> Any:
        """Return the vectors of B texts, (B, D), sparse."""
        return self._vectorizer.transform(self._token_ids(texts))


@dataclass(frozen=True)
class Fusion:
    """Fusion of several rankings: see :func:`fused`.

    Attributes:
        rankers: The rankings.
    """

    rankers: Sequence[Ranker]

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[Hits]:
        """Return indices and fused scores of at most ``count`` documents for each query, the best first."""
        hits = [ranker.nearest(queries, documents, max(count, _FUSED)) for ranker in self.rankers]
        return [fused([ranking[:_FUSED] for ranking in rankings])[:count] for rankings in zip(*hits, strict=True)]


@dataclass(frozen=True)
class RetrievalScores:
    """Scores of a ranking, with intervals over queries.

    Attributes:
        ndcg: nDCG@10.
        recall: Recall@100.
    """

    ndcg: Estimate
    recall: Estimate


def scored(data: Retrieval, rankers: Mapping[str, Ranker]) -> dict[str, RetrievalScores]:
    """Return nDCG@10 and recall@100 of several rankings of the same documents, on the same resamples of the queries.

    Args:
        data: The task. :func:`st_reba.data.tables.read_data` reads a folder in BEIR's layout.
        rankers: Rankers by name.
    """
    task = RetrievalTask(data)
    with torch.inference_mode():
        measured = {name: task.measure(ranker) for name, ranker in rankers.items()}
    estimates = {
        what: bootstrap.estimate(bootstrap.mean({name: values[what] for name, values in measured.items()}))
        for what in ("ndcg", "recall")
    }
    return {name: RetrievalScores(estimates["ndcg"][name], estimates["recall"][name]) for name in rankers}


def _best(similarities: Tensor, count: int) -> list[Hits]:
    """Return the highest of (Q, N) similarities in each row; of equals those with the lower index."""
    order = similarities.argsort(dim=1, descending=True, stable=True)[:, :count]
    values = similarities.gather(1, order)
    return [list(zip(row.tolist(), scores.tolist(), strict=True)) for row, scores in zip(order, values, strict=True)]
