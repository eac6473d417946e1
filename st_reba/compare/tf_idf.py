"""The control without a model: tf-idf of the texts' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer

from ..modules import CausalModule
from ..reading.words import tokens_of

# Texts of the same tokens are equals in a ranking, whatever rounding makes of them.
_DIGITS = 12


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

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[list[tuple[int, float]]]:
        """For each query the documents of the highest cosine, at most so many: their indices and cosines."""
        asked, there = map(self._vectors, (queries, documents))
        there = there.T.tocsc()
        hits = []
        for row in range(asked.shape[0]):
            scores = np.round((asked[row] @ there).toarray().ravel(), _DIGITS)
            # Of equals those that stand first.
            best = np.argsort(-scores, kind="stable")[:count]
            hits.append([(int(index), float(scores[index])) for index in best])
        return hits

    def unit_vectors(self, texts: Sequence[str]) -> Any:
        """Of each text one of length one, or 0 where it has no tokens: (B, D), sparse, of the tokens that occur."""
        vectors = self._vectors(texts)
        return vectors[:, vectors.getnnz(axis=0) > 0]

    def cosines(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """Of each text with the one in its place among the others, (B,); 0 where one has no tokens."""
        products = self._vectors(first).multiply(self._vectors(second))
        return np.round(np.asarray(products.sum(axis=1)).ravel(), _DIGITS)

    def _token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [tokens.ids for tokens in tokens_of(self._backbone, texts)]

    def _vectors(self, texts: Sequence[str]) -> Any:
        """Return the vectors of B texts, (B, D), sparse."""
        return self._vectorizer.transform(self._token_ids(texts))
