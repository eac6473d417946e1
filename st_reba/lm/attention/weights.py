"""The attention weights of one layer, formed piece by piece and never kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# The log of a weight that is nothing, yet a number.
_NOTHING = -1e4

# Keys are taken in blocks, because queries before the first key of a block are never asked for.
_KEY_BLOCK = 128

# Bytes of weights that are formed at a time: on a CPU what stays in a core's cache, on an accelerator, where each
# operation has a price of its own, enough to fill it.
_SCRATCH_BYTES = {"cpu": 2**20}
_SCRATCH_BYTES_ACCELERATOR = 2**28

_ALL = slice(None)


@dataclass(frozen=True)
class LayerWeights:
    """Weights as exp(score - log-sum-exp), for the architectures that call the attention function.

    A layer that attends both ways counts in a maximum over causal layers as follows. There the symmetrised
    (A_ij + A_ji) / 2 is half of A_ji off the diagonal, and A_ii on it. So that all layers are halved alike afterwards,
    this gives log(A_ij + A_ji) off the diagonal, and log A_ii on it.

    Attributes:
        layer: Its index.
        query: (B, H, N, d).
        key: (B, G, N, d), with G key-value heads; H is a multiple of G.
        log_sum_exp: (B, H, N).
        scale: Factor on the dot products.
        bias: Added to the scores, broadcastable to (B, H, N, N), or None.
        softcap: c of c * tanh(score / c), as in Gemma 2, or None.
        backward: Where the layer attends both ways, the same layer again, whose weights of query i on key j are added.
        positions: (B,) the key of each text, where there is one a text; None where keys are positions themselves, so
            that a query before a key is not asked for.
    """

    layer: int
    query: Tensor
    key: Tensor
    log_sum_exp: Tensor
    scale: float
    bias: Tensor | None = None
    softcap: float | None = None
    backward: LayerWeights | None = None
    positions: Tensor | None = None

    def largest(self, keys: slice, queries: slice) -> Tensor:
        """The largest log weight of all heads, (B, keys, queries), all formed at once; differentiable."""
        return self.log_weights(_ALL, _ALL, keys, queries).amax(dim=(1, 3))

    def log_weights(self, texts: slice, groups: slice, keys: slice, queries: slice) -> Tensor:
        """log p(query -> key), (texts, groups, keys, R, queries), with the R heads that share a key-value head."""
        query = by_group(self.query[texts, :, queries], self.key, groups)
        lse = by_group(self.log_sum_exp[texts, :, queries], self.key, groups).flatten(2, 3).flatten(0, 1)[:, None]
        # Anew, and widened, in one operation.
        key = self.key[texts, groups, keys].to(lse.dtype, memory_format=torch.contiguous_format)
        columns = query.to(lse.dtype, memory_format=torch.contiguous_format).flatten(2, 3).flatten(0, 1).mT
        # The log-sum-exp is taken off in the product itself, which spares a pass over the rectangle.
        taken_off = -1 if self.softcap is None else 0
        scale = self.scale / (self.softcap or 1)
        scores = torch.baddbmm(lse, key.flatten(0, 1), columns, beta=taken_off, alpha=scale)
        if self.softcap is not None:
            scores = scores.tanh() * self.softcap - lse
        weights = scores.unflatten(0, query.shape[:2]).unflatten(3, query.shape[2:4])
        if self.bias is not None:
            bias = self.bias[texts if self.bias.shape[0] > 1 else _ALL, :, queries, keys]
            weights = weights + by_group(bias, self.key, groups).permute(0, 1, 4, 2, 3)
        if self.backward is None:
            return weights
        # Clamped, because the gradient of logaddexp is NaN where neither sees the other.
        weights = weights.clamp(min=_NOTHING)
        backward = self.backward.log_weights(texts, groups, queries, keys).transpose(2, 4).clamp(min=_NOTHING)
        key_position = torch.arange(keys.start, keys.stop, device=weights.device)[None]
        if self.positions is not None:
            key_position = self.positions[texts, None]
        query_position = torch.arange(queries.start, queries.stop, device=weights.device)
        is_same = key_position[:, None, :, None, None] == query_position
        return torch.where(is_same, weights, torch.logaddexp(weights, backward))

    def at_keys(self, positions: Tensor) -> LayerWeights:
        """The same layer with one key a text, ``positions`` (B,)."""
        bias = None if self.bias is None else one_a_text(self.bias, positions, 3)
        backward = None if self.backward is None else self.backward.at_queries(positions)
        key = one_a_text(self.key, positions, 2)
        return replace(self, key=key, bias=bias, backward=backward, positions=positions.to(key.device))

    def at_queries(self, positions: Tensor) -> LayerWeights:
        """The same layer with one query a text, ``positions`` (B,), as it attends, and not as it counts both ways."""
        bias = None if self.bias is None else one_a_text(self.bias, positions, 2)
        query, log_sum_exp = (one_a_text(values, positions, 2) for values in (self.query, self.log_sum_exp))
        return replace(self, query=query, log_sum_exp=log_sum_exp, bias=bias, backward=None)


def fold(weights: LayerWeights, keys: slice, queries: slice, maximum: Tensor) -> None:
    """Fold the log weights of all heads of a layer into a running maximum, (B, keys, queries), in place.

    As many texts, then key-value heads, as fit the scratch memory are taken at a time. Where keys are positions,
    entries with query < key do not matter and may be left as they are.
    """
    block = min(_KEY_BLOCK, keys.stop - keys.start)
    (batch, heads, _, head_size), group_count = weights.query.shape, weights.key.shape[1]
    scratch = _SCRATCH_BYTES.get(maximum.device.type, _SCRATCH_BYTES_ACCELERATOR)
    # The rectangle of the heads that share a key, or the copy of their queries.
    of_a_group = 4 * (heads // group_count) * maximum.shape[2] * max(block, head_size)
    texts_at_once = min(batch, max(1, scratch // max(1, of_a_group)))
    groups_at_once = max(1, scratch // max(1, of_a_group * texts_at_once))
    for first_text in range(0, batch, texts_at_once):
        texts = slice(first_text, first_text + texts_at_once)
        for first_key in range(keys.start, keys.stop, block):
            part = slice(first_key, min(first_key + block, keys.stop))
            skipped = max(0, first_key - queries.start) if weights.positions is None else 0
            target = maximum[texts, first_key - keys.start : part.stop - keys.start, skipped:]
            for first in range(0, group_count, groups_at_once):
                groups = slice(first, first + groups_at_once)
                formed = weights.log_weights(texts, groups, part, slice(queries.start + skipped, queries.stop))
                # Of one head there is no maximum to take, which spares a pass over the rectangle.
                is_one = formed.shape[1] * formed.shape[3] == 1
                torch.maximum(target, formed[:, 0, :, 0] if is_one else formed.amax(dim=(1, 3)), out=target)


def by_group(values: Tensor, key: Tensor, part: slice = _ALL) -> Tensor:
    """(B, H, ...) as (B, G, H / G, ...), by the G key-value heads of ``key``, and a part of these.

    What is one for all heads, (B, 1, ...), stays so.
    """
    return values.unflatten(1, (key.shape[1], -1))[:, part] if values.shape[1] > 1 else values[:, :, None]


def one_a_text(values: Tensor, positions: Tensor, dim: int) -> Tensor:
    """One entry of a dimension for each text: (B or 1, ..., N, ...) and positions (B,) to (B, ..., 1, ...)."""
    shape = [len(positions), *values.shape[1:]]
    values = values.expand(shape)
    shape[dim] = 1
    index = positions.to(values.device).view(-1, *[1] * (len(shape) - 1))
    return values.gather(dim, index.expand(shape))
