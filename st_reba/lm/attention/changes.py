"""What can be changed in attention, layer by layer: the mask, the first key, and a key before all others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..backbone import for_summing
from .weights import one_a_text


class LayerMask(Protocol):
    """What replaces the mask that an architecture would use."""

    @property
    def layers(self) -> Collection[int] | None:
        """Indices of the layers whose masks are replaced; None: all."""
        ...

    def mask(self, causal_mask: Tensor | None, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """(B, 1, queries, keys), True where a key is seen; None if all are.

        ``keys`` is how many there are, ``window`` the layer's sliding window, ``device`` where the layer runs.
        """
        ...


@dataclass(frozen=True)
class Bidirectional:
    """Layers whose tokens attend to later ones too.

    Attributes:
        layers: Their indices.
        real: (B, N), which tokens are not padding: no real token attends to padding.
        padded: Whether there may be padding: where there is none, and no window, no mask is needed.
    """

    layers: Collection[int]
    real: Tensor
    padded: bool = True

    def mask(self, causal_mask: Tensor | None, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """(B, 1, N, N), True where a token is seen; None if every token sees every other.

        ``causal_mask`` is what the architecture would have used, (B or 1, 1, N, N); None for all earlier tokens. A
        sliding window stays a window, to both sides.
        """
        if causal_mask is None and not self.padded:
            return None
        seen = self.real.to(device)[:, None, None, :]
        if causal_mask is not None:
            past = causal_mask if causal_mask.dtype == torch.bool else causal_mask == 0
            seen = seen & (past | past.mT)
        # Padding sees itself at least: a softmax over nothing would be NaN.
        return seen | torch.eye(self.real.shape[1], dtype=torch.bool, device=device)


@dataclass(frozen=True)
class BehindPrefix:
    """New tokens behind cached prefixes of unequal lengths, whose caches are padded to N; or behind none.

    Attributes:
        lengths: (B,), or (1,) for all rows: cached tokens that count; those behind are neither seen nor part of the
            positions.
        new: How many tokens are new: they stand at positions lengths, lengths + 1, ...
    """

    lengths: Tensor
    new: int
    layers: ClassVar[None] = None
    _masks: dict[tuple[int, int | None, torch.device], Tensor] = field(default_factory=dict, repr=False)

    def mask(self, causal_mask: Tensor | None, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """(B, 1, new, N + new): the prefix and the new tokens up to itself, in the window. Made once for all layers."""
        kind = keys, window, device
        if kind in self._masks:
            return self._masks[kind]
        slot = torch.arange(keys - self.new, device=self.lengths.device)
        step = torch.arange(self.new, device=self.lengths.device)[None]
        # (B or 1, 1, new, N), and (1, 1, new, new).
        back = step[:, None, :, None] - step[:, None, None, :]
        position = self.lengths[:, None, None, None] + step[:, None, :, None]
        prefix = (slot < self.lengths[:, None, None, None]) & (position >= slot)
        own = back >= 0
        if window is not None:
            prefix = prefix & (position - slot < window)
            own = own & (back < window)
        rows = max(len(prefix), len(own))
        self._masks[kind] = torch.cat([part.expand(rows, -1, -1, -1) for part in (prefix, own)], dim=-1).to(device)
        return self._masks[kind]


@dataclass(frozen=True)
class HiddenFirst:
    """Layers in which no other token sees the first token of its row, whatever mask the layer has. It sees itself.

    Attributes:
        layers: Their indices.
    """

    layers: Collection[int]

    def mask(self, mask: Tensor | None, causal: bool, count: int, device: torch.device) -> Tensor:
        """(B or 1, 1, N, N): the layer's mask without the first token.

        Args:
            mask: The layer's mask, True where a key is seen, or added to the scores; None if it has none.
            causal: Whether a token sees earlier tokens alone where there is no mask.
            count: Number of tokens, N, none of which is cached.
            device: Where the layer runs.
        """
        key = torch.arange(count, device=device)
        own = key[:, None]
        hidden = (key == 0) & (key != own)
        if mask is None:
            mask = (key <= own if causal else torch.ones_like(hidden))[None, None]
        if mask.dtype != torch.bool:
            return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        # Padding sees itself at least: a softmax over nothing would be NaN.
        return mask & ~hidden | (key == own)


@dataclass(frozen=True)
class BehindAll:
    """New tokens behind cached texts that stand side by side: each was read behind the same tokens, from one position.

    Attributes:
        positions: (N,), where each cached token was read.
        start: The position of the first new token, behind all of these.
        new: How many tokens are new.
    """

    positions: Tensor
    start: int
    new: int
    layers: ClassVar[None] = None

    def mask(self, causal_mask: Tensor | None, keys: int, window: int | None, device: torch.device) -> Tensor | None:
        """(1, 1, new, N + new): all that is cached and the new tokens up to itself, in the window by positions."""
        own = self.start + torch.arange(self.new, device=device)
        back = own[:, None] - torch.cat([self.positions.to(device), own])
        seen = back >= 0
        return (seen if window is None else seen & (back < window))[None, None]


@dataclass(frozen=True)
class FirstKey:
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
        one = for_summing(self.taken(key).repeat_interleave(groups, dim=1))
        logits = (for_summing(query) @ one.mT)[..., 0] * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if position_bias is not None:
            # The key keeps its position.
            logits = logits + one_a_text(position_bias, self.positions, 3)[..., 0].to(logits)
        return logits + self.bias

    def taken(self, states: Tensor) -> Tensor:
        """(B, G, 1, d): the token's, of (B, G, N, d)."""
        return one_a_text(states, self.positions, 2)
