"""Inverse document frequency of token ids: how little a token tells, from how many texts have it."""

from __future__ import annotations

import torch
from torch import Tensor


class DocumentFrequencies:
    """In how many texts each token id occurs, without keeping the texts.

    Attributes:
        texts: N, how many texts there were that have tokens.
        counts: (V,), whole numbers: the texts that have each token.
    """

    def __init__(self, vocabulary_size: int) -> None:
        self.texts = 0
        self.counts = torch.zeros(vocabulary_size, dtype=torch.int64)

    def add(self, texts: Tensor, ids: Tensor) -> None:
        """Take the tokens of some texts in, each text whole.

        Args:
            texts: (T,), for each token the number of its text among these.
            ids: (T,), its id.
        """
        size = len(self.counts)
        # Each token once a text.
        pairs = (texts * size + ids).unique()
        self.counts += torch.bincount(pairs % size, minlength=size)
        self.texts += len(texts.unique())

    @property
    def idf(self) -> Tensor:
        r"""(V,), float64: :math:`\ln \frac{1 + N}{1 + df} + 1`, the smooth form that scikit-learn uses.

        A token that is in every text has 1, and one that no text had has the most.
        """
        return torch.log((1 + self.texts) / (1 + self.counts.double())) + 1
