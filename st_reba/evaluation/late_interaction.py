"""How alike texts are to a model that gives each of their tokens a vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .tasks import Array

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder


@dataclass(frozen=True)
class LateInteraction:
    """Similarity by MaxSim, with which any task of :mod:`.tasks` measures a multi-vector model.

    ``task_of(read_data("cranfield")).measure(LateInteraction(model))`` gives nDCG@10 and recall@100 of each query.
    Queries and documents are encoded by ``encode_query`` and ``encode_document``, behind the model's own prompts.

    Attributes:
        model: Whose vectors; its own similarity decides between MaxSim and its mean over the tokens of a query.
        batch_size: Texts at a time.
        chunk_size: Documents whose vectors are in memory at a time.
    """

    model: MultiVectorEncoder
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

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[list[tuple[int, float]]]:
        """For each query the documents that score highest, at most so many: their indices and scores, falling."""
        asked = self._encoded(queries, "encode_query")
        best: Tensor | None = None
        where = torch.empty(0, dtype=torch.float32)
        for start in range(0, len(documents), self.chunk_size):
            chunk = self._encoded(documents[start : start + self.chunk_size], "encode_document")
            scores = self.model.similarity(asked, chunk).cpu()
            indices = torch.arange(start, start + len(chunk)).expand_as(scores)
            if best is not None:
                scores, indices = torch.cat([best, scores], dim=1), torch.cat([where, indices], dim=1)
            best, order = scores.topk(min(count, scores.shape[1]), dim=1)
            where = indices.gather(1, order)
        if best is None:
            return [[] for _ in queries]
        return [
            [(int(index), float(score)) for index, score in zip(row, scores, strict=True)]
            for row, scores in zip(where, best, strict=True)
        ]

    def _encoded(self, texts: Sequence[str], how: str) -> list[Tensor]:
        """(tokens, D) of each text."""
        found: list[Tensor] = getattr(self.model, how)(list(texts), batch_size=self.batch_size, show_progress_bar=False)
        return found
