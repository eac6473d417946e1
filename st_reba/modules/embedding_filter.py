"""Filter of embeddings by the language model's head."""

from __future__ import annotations

from itertools import chain
from os import PathLike
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ..moments import principal_directions
from ..settings import check, check_int
from .embedding_transforms import EmbeddingTransform
from .lm_head import head_blocks


class EmbeddingFilter(EmbeddingTransform):
    r"""Keeps the part of an embedding in the middle singular directions of the language model's head.

    .. math:: e' = V_{[low, high)}^\top e, \qquad W = U \Sigma V^\top \in \mathbb{R}^{|\mathcal{V}| \times D}

    (EmbedFilter, arXiv 2606.07502.) Frequent, uninformative tokens use the directions with the largest and the smallest
    singular values. The others are in the order of falling singular values, so that ``truncate_dim=n`` gives the same
    as ``keep=(low, low + n)``.

    Use :meth:`from_language_model`.

    Args:
        directions: (k, D), orthonormal rows.
        low: Number of directions with larger singular values that were left out.

    Raises:
        ValueError: If ``directions`` are not a matrix of at most D rows, or ``low`` does not fit them.
    """

    config_keys = [*EmbeddingTransform.config_keys, "low"]

    SHAPES = {"directions": "kD"}

    directions: Tensor

    def __init__(self, directions: Tensor, low: int = 0) -> None:
        super().__init__(directions=directions)
        most = self.in_features - self.out_features
        advice = (
            f"with {self.out_features} of {self.in_features} directions kept it is a whole number from 0 to {most}."
        )
        self.low = check_int("low", low, 0, most, advice)

    @property
    def keep(self) -> tuple[int, int]:
        """Range of directions that are kept, (low, high), counted from 0 by falling singular value."""
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
            model_or_path: Path or Hub id of a language model, of which only the head is read; or a loaded model, module
                or pipeline.
            skip_first: Number of directions with the largest singular values that are left out; 0 if only ``skip_last``
                is given. Without any choice the middle half is kept, as in the authors' code.
            skip_last: Number of directions with the smallest singular values that are left out; 0 if only
                ``skip_first`` is given.
            keep: Range of directions to keep, (low, high), in place of the two.
            device: Device on which to compute; it needs float64.
            **hub_kwargs: ``revision``, ``token``, ``cache_folder`` and ``local_files_only`` of the checkpoint.

        Raises:
            ValueError: If there is no head, or the choice keeps nothing or is out of range.
        """
        is_pair = isinstance(keep, (tuple, list)) and [*map(type, keep)] == [int, int]
        check("keep", keep, keep is None or is_pair, "give (low, high), two whole numbers.")
        if keep is not None and (skip_first, skip_last) != (None, None):
            raise ValueError(
                f"keep={keep!r} with skip_first={skip_first!r} and skip_last={skip_last!r}: give one or the other."
            )
        for name, skipped in (("skip_first", skip_first), ("skip_last", skip_last)):
            check_int(name, skipped or 0, 0, advice="give how many directions to leave out, 0 or more.")
        blocks = head_blocks(model_or_path, **hub_kwargs)
        first = next(blocks)
        dimension = first.shape[1]
        if (skip_first, skip_last, keep) == (None, None, None):
            kept = max(1, dimension // 2)
            keep = (dimension - kept) // 2, (dimension - kept) // 2 + kept
        low, high = keep or (skip_first or 0, dimension - (skip_last or 0))
        if not 0 <= low < high <= dimension:
            raise ValueError(
                f"keep=({low}, {high}) of the head's {dimension} directions: give 0 <= low < high <= {dimension}, so "
                "that something is kept."
            )
        gram = torch.zeros(dimension, dimension, dtype=torch.float64, device=device)
        for block in chain([first], blocks):
            rows = block.to(device, torch.float64)
            gram.addmm_(rows.mT, rows)
        _, directions = principal_directions(gram)
        return cls(directions[low:high].cpu(), low)

    def _transform(self, embedding: Tensor) -> Tensor:
        return linear(embedding, self.directions.to(embedding.dtype))
