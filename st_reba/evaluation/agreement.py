"""How far one embedding puts texts where another one puts them, without labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from scipy.stats import spearmanr
from sentence_transformers.base import BaseModel
from torch import Tensor
from torch.nn.functional import normalize

from .evaluator import Evaluator

#: Nearest texts of each that are looked at.
NEIGHBOURS = 10


class AgreementEvaluator(Evaluator):
    """How well a model's cosines of plain texts agree with those of a teacher's vectors.

    The metrics are ``spearman_cosines``, the primary one, the rank correlation of the two cosines over all pairs of
    texts; and ``shared_neighbours``, the share of each text's :data:`NEIGHBOURS` nearest by the teacher that are among
    its nearest by the model. Both are 1 for a model that puts the texts in the teacher's order.

    Args:
        texts: n of them, best ones that the model was not trained on, some hundreds.
        vectors: (n, D), the teacher's.
        name: Prefix of the metrics.
        batch_size: Texts at a time.

    Raises:
        ValueError: If there are fewer than three texts, or not a vector for each.
    """

    metric = "spearman_cosines"

    def __init__(self, texts: Sequence[str], vectors: Tensor, *, name: str = "", batch_size: int = 32) -> None:
        super().__init__(name=name, batch_size=batch_size)
        if len(texts) != len(vectors) or len(texts) < 3:
            raise ValueError(
                f"{len(texts)} texts and {len(vectors)} vectors were given: give at least three texts, and a vector "
                "for each."
            )
        self.texts = list(texts)
        self.cosines = _cosines(vectors)

    def __call__(
        self, model: BaseModel, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """The metrics, also noted for the model card."""
        found = cast(Any, model).encode(
            self.texts, batch_size=self.batch_size, convert_to_tensor=True, show_progress_bar=False
        )
        return self.noted(model, agreement(self.cosines, _cosines(found)), output_path, epoch, steps)


def agreement(first: Tensor, second: Tensor) -> dict[str, float]:
    """The metrics of two matrices of cosines, (n, n) each."""
    above = torch.triu_indices(len(first), len(first), offset=1)
    one, other = (cosines[above[0], above[1]].numpy() for cosines in (first, second))
    alike = np.ptp(one) and np.ptp(other)
    return {
        "spearman_cosines": float(spearmanr(one, other).statistic) if alike else float("nan"),
        "shared_neighbours": _shared(first, second),
    }


def _shared(first: Tensor, second: Tensor) -> float:
    count = min(NEIGHBOURS, len(first) - 1)
    near = []
    for cosines in (first, second):
        others = cosines.clone().fill_diagonal_(-2)
        near.append(torch.zeros_like(others).scatter_(1, others.topk(count, dim=1).indices, 1))
    return float((near[0] * near[1]).sum() / near[0].sum())


def _cosines(vectors: Tensor) -> Tensor:
    unit = normalize(vectors.detach().float().cpu(), dim=-1)
    return unit @ unit.mT
