"""Hooks that change attention or watch it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..passes import AttentionCall, Hook
from .kernels import LogWeights, fold_kernel, one_each, update_running_max, widen


@dataclass(eq=False)
class Bidirectional(Hook):
    """Let layers attend to later tokens too. Padding stays hidden, and a sliding window becomes one to both sides.

    Attributes:
        layers: Indices of the layers.
        real: (B, N), the tokens that are not padding.
    """

    layers: Collection[int] = field()
    real: Tensor

    def before_attention(self, call: AttentionCall) -> None:
        call.both_ways, call.causal = True, False
        if call.mask is None and bool(self.real.all()):
            return
        real = self.real.to(call.query.device)
        seen = real[:, None, None, :]
        if call.mask is not None:
            past = call.mask if call.mask.dtype == torch.bool else call.mask == 0
            seen = seen & (past | past.mT)
        call.mask = see_something(seen)


def see_something(seen: Tensor) -> Tensor:
    """Return a mask, (..., N, N), in which queries that see no key see themselves: a softmax over nothing is NaN."""
    itself = torch.eye(seen.shape[-1], dtype=torch.bool, device=seen.device)
    return seen | (itself & ~seen.any(dim=-1, keepdim=True))


@dataclass(eq=False)
class ExtraKey(Hook):
    r"""Put the key and value of one token of each row before all others, visible to every query.

    .. math:: \tilde K = [k_n; K], \quad \tilde V = [v_n; V]

    Attributes:
        layers: Indices of the layers.
        positions: (B,), the position of the token.
        bias: Added to the logit of the extra key.
    """

    layers: Collection[int] = field()
    positions: Tensor
    bias: float = 0.0

    def after_attention(self, call: AttentionCall, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (
            one_each(states, self.positions, 2).repeat_interleave(output.shape[1] // states.shape[1], dim=1)
            for states in (call.key, call.value)
        )
        logits = (widen(call.query) @ widen(key).mT)[..., 0] * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        if call.position_bias is not None:
            logits = logits + one_each(call.position_bias, self.positions, 3)[..., 0].to(logits)
        logits = logits + self.bias
        # A softmax with one more logit mixes: sigmoid(logit - lse) goes to the new value, the rest to the old output.
        weight = torch.sigmoid(logits - lse)[..., None]
        mixed = (1 - weight) * widen(output) + nn.functional.dropout(weight, call.dropout) * widen(value)
        return mixed.to(output.dtype), torch.logaddexp(lse, logits)


@dataclass(eq=False)
class MeanWeights(Hook):
    """Keep the weights of one query of each row, averaged over the heads of one layer.

    Attributes:
        layer: Index of the layer.
        positions: (B,), the position of the query.
        weights: (B, M), one for each key, after the pass. Keys behind the query may have any weight.
    """

    layer: int
    positions: Tensor
    weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.layers = (self.layer,)

    def after_attention(self, call: AttentionCall, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        weights = LogWeights.of(call, lse).at_queries(self.positions)
        self.weights = weights.form().exp().mean(dim=(1, 3))[..., 0]
        return output, lse


@dataclass(eq=False)
class RunningMaximum(Hook):
    """Keep the largest weight of any layer and head, for a rectangle of keys and queries.

    exp is monotone: the maximum runs over log weights. Only entries with query >= key are meaningful.

    Attributes:
        keys: Slice of key positions.
        queries: Slice of query positions.
        layers: Indices of the layers; None for all.
        maximum: (B, keys, queries), largest log weights, after the pass; float32 or float64.
    """

    keys: slice
    queries: slice
    layers: Collection[int] | None = None
    maximum: Tensor | None = field(default=None, init=False)

    def after_attention(self, call: AttentionCall, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        # Keys of the past are not among those of the layout.
        weights = LogWeights.of(call, lse).of_last_keys(call.query.shape[2])
        if call.both_ways:
            weights = replace(weights, backward=weights)
        maximum = self.maximum
        if torch.is_grad_enabled():
            formed = weights.form(keys=self.keys, queries=self.queries).amax(dim=(1, 3))
            self.maximum = formed if maximum is None else torch.maximum(maximum.to(formed.device), formed)
            return output, lse
        if maximum is None:
            lengths = (part.stop - part.start for part in (self.keys, self.queries))
            maximum = lse.new_full((len(lse), *lengths), float("-inf"))
        # Each layer may be on a device of its own.
        self.maximum = maximum.to(lse.device)
        update = fold_kernel(weights) or update_running_max
        update(weights, self.keys, self.queries, self.maximum)
        return output, lse

    def symmetrised(self) -> Tensor:
        """Return the maximum of (A_ij + A_ji) / 2 for keys i and queries j >= i, (B, keys, queries), 0 where j < i.

        Half of the maximum of A_ji off the diagonal, and that of A_ii on it: A is lower triangular.
        """
        if self.maximum is None:
            raise RuntimeError("No watched layer ran: resolve the layers with LanguageModel.resolve.")
        device = self.maximum.device
        key, query = (torch.arange(part.start, part.stop, device=device) for part in (self.keys, self.queries))
        weights = self.maximum.masked_fill(query < key[:, None], float("-inf")).exp()
        return torch.where(query == key[:, None], weights, weights / 2)
