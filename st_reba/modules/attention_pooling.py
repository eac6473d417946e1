"""Attention pooling: the last token weighs the others."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import nn

from ..lm.attention.hooks import MeanWeights
from ..lm.attention.kernels import weighted_sum
from ..text.layout import Layout
from .causal import CausalTransformer
from .vectors import TokenVectors, last_position, zero_unselected


class AttentionPoolingModule(CausalTransformer):
    r"""A mean of the tokens' states, weighted by the last token's attention in the last layer.

    .. math:: e = \frac{\sum_j a_j v_j}{\sum_j a_j}, \quad a_j = \frac{1}{H} \sum_h A^{(L,h)}_{nj}

    The sums run over the tokens that ``pool_over`` names, and n is the last of them.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        **settings: As for :class:`CausalModule`.
    """

    method = "Attention pooling"
    equation = r"e = \frac{\sum_j a_j v_j}{\sum_j a_j}, \quad a_j = \frac{1}{H} \sum_h A^{(L,h)}_{nj}"
    has_token_vectors = False

    def __init__(self, model_name_or_path: str | PathLike[str] | nn.Module, **settings: Any) -> None:
        super().__init__(model_name_or_path, **settings)
        [self._last] = self.lm.resolve([-1], "watched")

    def read(self, layout: Layout) -> TokenVectors:
        selected = self.selected(layout, every=True)
        n = last_position(selected)
        attended = MeanWeights(self._last, n)
        v = self.run(layout, attended)
        a = zero_unselected(attended.weights, selected)
        a = a / a.sum(dim=1, keepdim=True).clamp(min=torch.finfo(a.dtype).tiny)
        return TokenVectors.one_each(weighted_sum(a[:, None], v)[:, 0].to(v), layout, n)
