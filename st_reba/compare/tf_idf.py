"""The control without any model: how alike two texts are in the tokens that they are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from ..lm.backbone import vocabulary_size
from ..modules import CausalModule
from ..text.words import DocumentFrequencies


class TfIdf:
    r"""Cosines of tf-idf vectors of token ids: a :class:`~st_reba.evaluation.tasks.Similarity`.

    .. math:: x_w = tf(w) \, idf(w), \qquad idf(w) = \ln \frac{1 + N}{1 + df(w)} + 1

    tf(w) is how often the text has the token w: plain counts, and the smooth idf that scikit-learn uses. The vectors
    have as many dimensions as the vocabulary has tokens, nearly all of them 0, and are kept sparse.

    Args:
        backbone: Says what the tokens of a text are; its language model is not run.
        texts: Plain texts that df and N are counted on.

    Attributes:
        texts: N.
    """

    def __init__(self, backbone: CausalModule, texts: Sequence[str]) -> None:
        self.texts = len(texts)
        self._token_ids = backbone.token_ids
        frequencies = DocumentFrequencies(vocabulary_size(backbone.model))
        ids = [torch.tensor(own, dtype=torch.long) for own in self._token_ids(texts)]
        rows = [torch.full_like(own, row) for row, own in enumerate(ids)]
        frequencies.add(torch.cat(rows), torch.cat(ids))
        self._idf = frequencies.idf.numpy()

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[list[tuple[int, float]]]:
        """For each query the documents of the highest cosine, at most so many: their indices and cosines."""
        asked, there = self._vectors(queries), self._vectors(documents).T.tocsc()
        found = []
        for row in range(asked.shape[0]):
            scores = (asked[row] @ there).toarray().ravel()
            # Of equals those that stand first.
            best = np.argsort(-scores, kind="stable")[:count]
            found.append([(int(index), float(scores[index])) for index in best])
        return found

    def cosines(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """Of each text with the one in its place among the others, (B,); 0 where one has no tokens."""
        distinct = list(dict.fromkeys([*first, *second]))
        vectors = self._vectors(distinct)
        row = {text: index for index, text in enumerate(distinct)}
        sides = [vectors[[row[text] for text in side]] for side in (first, second)]
        return np.asarray(sides[0].multiply(sides[1]).sum(axis=1)).ravel()

    def _vectors(self, texts: Sequence[str]) -> csr_matrix:
        """(B, V), of length 1."""
        ids = self._token_ids(texts)
        ends = np.cumsum([0, *map(len, ids)])
        tokens = np.concatenate([np.asarray(own, dtype=np.int64) for own in ids])
        counts = csr_matrix((np.ones(len(tokens)), tokens, ends), shape=(len(texts), len(self._idf)))
        # The same token twice is one dimension with 2.
        counts.sum_duplicates()
        counts.data *= self._idf[counts.indices]
        lengths = np.sqrt(np.asarray(counts.multiply(counts).sum(axis=1)).ravel())
        counts.data /= np.repeat(lengths, np.diff(counts.indptr))
        return counts
