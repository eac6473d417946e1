"""One token's key and value before all others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ..precision import widened


@dataclass(frozen=True)
class Rerouting:
    r"""A token of each text whose key and value stand before all others too, so that every token sees them.

    .. math:: \tilde K = [k_n; K], \quad \tilde V = [v_n; V]

    Key and value are those that the layer computed, at the position where the token stands; whatever mask or window the
    layer has, it does not hide them.

    Attributes:
        layers: Indices of the layers.
        positions: (B,) where the token stands.
        bias: Added to the logit of the key that stands before all others.
    """

    layers: Collection[int]
    positions: Tensor
    bias: float = 0.0

    def logits(
        self, query: Tensor, key: Tensor, scale: float, softcap: float | None, position_bias: Tensor | None
    ) -> Tensor:
        """What each query gives the token's key, (B, H, N), float32 or float64."""
        groups = query.shape[1] // key.shape[1]
        one = widened(self.taken(key).repeat_interleave(groups, dim=1))
        logits = (widened(query) @ one.mT)[..., 0] * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if position_bias is not None:
            # The key keeps its position.
            index = self.positions.to(query.device).view(-1, 1, 1, 1)
            whole = position_bias.expand(len(query), -1, -1, -1)
            logits = logits + whole.gather(3, index.expand(*whole.shape[:3], 1))[..., 0].to(logits)
        return logits + self.bias

    def taken(self, states: Tensor) -> Tensor:
        """(B, G, 1, d): the token's, of (B, G, N, d)."""
        index = self.positions.to(states.device).view(-1, 1, 1, 1)
        return states.gather(2, index.expand(-1, states.shape[1], 1, states.shape[3]))
