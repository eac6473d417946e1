"""The filter of the language model's head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from os import PathLike
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ..settings import Setting, optional, whole
from .embedding_transforms import EmbeddingTransform
from .lm_head import head_blocks
from .moments import principal_directions

SKIP_FIRST = optional(whole("skip_first", 0, says="give how many directions to leave out, 0 or more."))
SKIP_LAST = optional(whole("skip_last", 0, says=SKIP_FIRST.says))
KEEP: Setting[tuple[int, int] | None] = Setting(
    "keep",
    lambda value: value is None or (isinstance(value, Sequence) and [type(bound) for bound in value] == [int, int]),
    "give (low, high), two whole numbers.",
)


class EmbeddingFilter(EmbeddingTransform):
    r"""Keeps the part of an embedding that lies in the middle singular directions of the language model's head.

    .. math:: e' = V_{[low, high)}^\top e, \qquad W = U \Sigma V^\top \in \mathbb{R}^{|\mathcal{V}| \times D}

    (EmbedFilter, arXiv 2606.07502.) The directions with the largest and the smallest singular values are those that
    frequent, uninformative tokens are written in. The kept ones stand in the order of falling singular values, so that
    ``truncate_dim=n`` gives what ``keep=(low, low + n)`` does.

    Use :meth:`from_language_model`.

    Args:
        directions: (k, D), orthonormal rows.
        low: How many directions with larger singular values were left out.

    Raises:
        ValueError: If ``directions`` are not a matrix of no more rows than columns, or ``low`` does not fit them.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*EmbeddingTransform.config_keys, "low"]

    directions: Tensor

    def __init__(self, directions: Tensor, low: int = 0) -> None:
        if directions.ndim != 2 or not 1 <= len(directions) <= directions.shape[1]:
            raise ValueError(f"directions is {tuple(directions.shape)}: give (k, D) with k from 1 to D.")
        kept, all_there_are = directions.shape
        says = f"with {kept} of {all_there_are} directions kept it is a whole number from 0 to {all_there_are - kept}."
        self.low = whole("low", 0, all_there_are - kept, says).check(low)
        super().__init__(directions=directions)
        self.out_features, self.in_features = kept, all_there_are

    @property
    def keep(self) -> tuple[int, int]:
        """(low, high): the singular directions that are kept, of 0 to D - 1 by falling singular value; high is not."""
        return self.low, self.low + self.out_features

    @classmethod
    def from_language_model(
        cls,
        model_or_path: str | PathLike[str] | SentenceTransformer | Transformer | PreTrainedModel,
        *,
        skip_first: int | None = None,
        skip_last: int | None = None,
        keep: tuple[int, int] | None = None,
        device: str | torch.device = "cpu",
        **hub_kwargs: Any,
    ) -> EmbeddingFilter:
        """Compute the filter of a language model.

        The right singular vectors of W (V, D) are the eigenvectors of W^T W (D, D), which is summed over blocks of the
        vocabulary in float64: memory does not grow with V.

        Args:
            model_or_path: A language model's path or Hub id, of which the head alone is read; or a loaded model,
                module or pipeline.
            skip_first: How many directions with the largest singular values to leave out; 0 if only ``skip_last`` is
                given. With no choice at all the middle half is kept, as in the authors' code.
            skip_last: How many directions with the smallest singular values to leave out; 0 if only ``skip_first`` is
                given.
            keep: (low, high) instead of both: which to keep, counted by falling singular value.
            device: Where to compute; it needs float64.
            **hub_kwargs: ``revision``, ``token``, ``cache_folder`` and ``local_files_only`` of the checkpoint.

        Raises:
            ValueError: If there is no head, or the choice keeps nothing, or is out of range.
        """
        if KEEP.check(keep) is not None and (skip_first, skip_last) != (None, None):
            raise ValueError(
                f"keep={keep!r} with skip_first={skip_first!r} and skip_last={skip_last!r}: give one or the other."
            )
        SKIP_FIRST.check(skip_first)
        SKIP_LAST.check(skip_last)
        blocks = head_blocks(model_or_path, **hub_kwargs)
        first = next(blocks)
        dimension = first.shape[1]
        low, high = _bounds(dimension, skip_first, skip_last, keep)
        gram = torch.zeros(dimension, dimension, dtype=torch.float64, device=device)
        for block in chain([first], blocks):
            rows = block.to(device, torch.float64)
            gram.addmm_(rows.mT, rows)
        _, directions = principal_directions(gram)
        return cls(directions[low:high].cpu(), low)

    def _transform(self, embedding: Tensor) -> Tensor:
        return linear(embedding, self.directions.to(embedding.dtype))


def _bounds(
    dimension: int, skip_first: int | None, skip_last: int | None, keep: tuple[int, int] | None
) -> tuple[int, int]:
    if (skip_first, skip_last, keep) == (None, None, None):
        kept = max(1, dimension // 2)
        skip_first = (dimension - kept) // 2
        skip_last = dimension - kept - skip_first
    low, high = keep or (skip_first or 0, dimension - (skip_last or 0))
    if not 0 <= low < high <= dimension:
        raise ValueError(
            f"keep=({low}, {high}) of the head's {dimension} directions: give 0 <= low < high <= {dimension}, so that "
            "something is kept."
        )
    return low, high
