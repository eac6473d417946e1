"""Attention pooling: the last token says how much each token counts."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import nn

from ..lm import backbone
from ..lm.attention.observers import MeanWeights
from ..lm.attention.setup import watched_last_layer
from ..text.layout import Layout
from .causal_transformer import CausalTransformer
from .token_vectors import TokenVectors, last_position


class AttentionPoolingModule(CausalTransformer):
    r"""A mean of the tokens' states, weighted by the last token's attention in the last layer, averaged over its heads.

    .. math:: e = \frac{\sum_j a_j v_j}{\sum_j a_j}, \quad a_j = \frac{1}{H} \sum_h A^{(L,h)}_{nj}

    The sums run over the tokens that ``pool_over`` names, and n is the last of them. A text has one vector, (B, 1, D).

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        **transformer_kwargs: As for :class:`CausalTransformer`.

    Raises:
        ValueError: If the last layer's attention cannot be watched, or as :class:`CausalTransformer` does.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    no_words = "gives a text as a whole its vector, and its tokens none"
    method = "Attention pooling"
    equation = r"e = \frac{\sum_j a_j v_j}{\sum_j a_j}, \quad a_j = \frac{1}{H} \sum_h A^{(L,h)}_{nj}"

    def __init__(self, model_name_or_path: str | PathLike[str] | nn.Module, **transformer_kwargs: Any) -> None:
        super().__init__(model_name_or_path, **transformer_kwargs)
        self._last_layer = watched_last_layer(self.model, "ReBAModule")

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        selected = self.selected(layout)
        last, device = last_position(selected), backbone.device(self.model)
        observer = MeanWeights(last.to(device, non_blocking=True), self._last_layer)
        states = self.run(layout, observe=observer, **kwargs)
        weights = (observer.result() * selected.to(device, non_blocking=True)).to(states)
        # A text without tokens has no weights: the base module gives it a zero vector.
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        ids = layout.input_ids.gather(1, last[:, None]).to(states.device, non_blocking=True)
        return TokenVectors(weights[:, None] @ states, torch.ones_like(ids, dtype=torch.bool), ids)
