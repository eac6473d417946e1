"""Attention that hooks can watch and change, registered with transformers as an attention implementation.

Attention maps are never stored. The weight with which query j attends to key i is exp(q_j k_i * scale - lse_j), and a
hook forms as few of them as it needs from queries, keys and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from st_reba.lm.attention.kernels import explicit_attention, trusted_kernel

from .passes import AttentionCall, Hook, hooks_at_attention

#: Name of the implementation in transformers.
ATTENTION = "st_reba_heart"

# Memory of the scores formed at a time: what stays in a core's cache, or what fills an accelerator.
_SCRATCH = {"cpu": 2**20}
_SCRATCH_ACCELERATOR = 2**28
_KEY_BLOCK = 128
# Log weight of what is not attended to, with a finite gradient.
_HIDDEN = -1e4
_ALL = slice(None)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers asks for it, (B, N, H, d), with the hooks of the active pass."""
    hooks = hooks_at_attention(module)
    if not hooks and softcap is None and s_aux is None and position_bias is None:
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal)
    call = AttentionCall(
        getattr(module, "layer_idx", -1), query, key, value,
        attention_mask if attention_mask is None else attention_mask[..., : key.shape[2]],
        getattr(module, "is_causal", True) if is_causal is None else is_causal,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window, softcap, s_aux, position_bias, dropout,
    )  # fmt: skip
    for hook in hooks:
        hook.before_attention(call)
    readers = [hook for hook in hooks if hook.reads_weights]
    output, lse = compute(call, with_lse=bool(readers))
    for hook in readers:
        output, lse = hook.after_attention(call, output, lse)
    return output.transpose(1, 2).contiguous(), None


def compute(call: AttentionCall, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return the output (B, H, N, d) and the log-sum-exp (B, H, N) of each query, None where it is not asked for."""
    query, key, bias = call.query, call.key, call.bias
    causal = call.causal and call.mask is None and query.shape[2] > 1
    needs_softmax = call.softcap is not None or call.sinks is not None
    if not with_lse and not needs_softmax:
        is_causal, groups = causal and bias is None, key.shape[1] < query.shape[1]
        if causal and bias is not None:
            bias = bias + query.new_full(bias.shape[2:], float("-inf")).triu(1)
        mask = call.mask if call.position_bias is None else bias
        return scaled_dot_product_attention(
            query, key, call.value, mask, call.dropout, is_causal, scale=call.scale, enable_gqa=groups
        ), None
    if causal and bias is not None:
        bias, causal = bias + query.new_full(bias.shape[2:], float("-inf")).triu(1), False
    # The log-sum-exp of the fused kernels has no gradient, and they know no dropout with it.
    trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    if needs_softmax or call.dropout > 0 or trains:
        args = (call.softcap, call.sinks, call.dropout)
        return explicit_attention(query, key, call.value, bias, causal, call.scale, *args)
    heads_a_group = query.shape[1] // key.shape[1]
    kernel = trusted_kernel(query.device.type, query.dtype, query.shape[-1], heads_a_group, bias is not None)
    return kernel(query, key, call.value, bias, causal, call.scale)


def register() -> None:
    """Make the implementation known to transformers, with the masks of ``sdpa``."""
    AttentionInterface.register(ATTENTION, torch.compiler.disable(attention))
    AttentionMaskInterface.register(ATTENTION, AttentionMaskInterface()["sdpa"])


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
        call.both_ways = True
        call.causal = False
        if call.mask is None and bool(self.real.all()):
            return
        real = self.real.to(call.query.device)
        seen = real[:, None, None, :]
        if call.mask is not None:
            past = call.mask if call.mask.dtype == torch.bool else call.mask == 0
            seen = seen & (past | past.mT)
        # Padding sees itself: a softmax over nothing would be NaN.
        call.mask = seen | torch.eye(real.shape[1], dtype=torch.bool, device=real.device)


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
        key, value = (_one_each(states, self.positions, 2) for states in (call.key, call.value))
        key, value = (states.repeat_interleave(output.shape[1] // states.shape[1], dim=1) for states in (key, value))
        logits = (_wide(call.query) * _wide(key)).sum(dim=-1) * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        if call.position_bias is not None:
            logits = logits + _one_each(call.position_bias, self.positions, 3)[..., 0].to(logits)
        logits = logits + self.bias
        # A softmax with one more logit mixes: sigmoid(logit - lse) goes to the new value, the rest to the old output.
        weight = torch.sigmoid(logits - lse)[..., None]
        given = weight if call.dropout == 0 else nn.functional.dropout(weight, call.dropout)
        mixed = (1 - weight) * _wide(output) + given * _wide(value)
        return mixed.to(output.dtype), torch.logaddexp(lse, logits)


@dataclass(eq=False)
class MeanWeights(Hook):
    """Keep the weights of one query of each row, averaged over the heads of one layer.

    Attributes:
        layer: Index of the layer.
        positions: (B,), the position of the query.
        weights: (B, M), one for each key, after the pass.
    """

    layer: int
    positions: Tensor
    weights: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.layers = (self.layer,)

    def after_attention(self, call: AttentionCall, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        bias = None if call.bias is None else _one_each(call.bias, self.positions, 2)
        query, own_lse = _one_each(call.query, self.positions, 2), _one_each(lse, self.positions, 2)
        weights = LogWeights(query, call.key, own_lse, call.scale, bias, call.softcap)
        self.weights = weights.form().exp().mean(dim=(1, 3))[..., 0]
        return output, lse


@dataclass(eq=False)
class RunningMaximum(Hook):
    """Keep the largest weight of any layer and head, for a rectangle of keys and queries.

    exp is monotone: the maximum runs over log weights. Only entries with query >= key are meaningful.

    In a layer that attends both ways, A_ij + A_ji takes the place of A_ji off the diagonal.

    Attributes:
        keys: Slice of key positions, or one position for each row, (B,).
        queries: Slice of query positions.
        layers: Indices of the layers; None for all.
        maximum: (B, keys, queries), largest log weights, after the pass; float32 or float64.
    """

    keys: slice | Tensor
    queries: slice
    layers: Collection[int] | None = None
    maximum: Tensor | None = field(default=None, init=False)

    def after_attention(self, call: AttentionCall, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        # Keys of the past are not among those of the layout.
        length = call.query.shape[2]
        bias = None if call.bias is None else call.bias[..., -length:]
        weights = LogWeights(call.query, call.key[:, :, -length:], lse, call.scale, bias, call.softcap)
        backward = weights if call.both_ways else None
        keys = self.keys
        if isinstance(keys, Tensor):
            backward = backward and weights.at_queries(keys)
            weights, keys = weights.at_keys(keys), slice(0, 1)
        if torch.is_grad_enabled() or backward is not None:
            formed = self._largest(weights, backward, keys)
            self.maximum = formed if self.maximum is None else torch.maximum(self.maximum.to(formed.device), formed)
        else:
            if self.maximum is None:
                shape = (len(lse), keys.stop - keys.start, self.queries.stop - self.queries.start)
                self.maximum = lse.new_full(shape, float("-inf"))
            self.maximum = self.maximum.to(lse.device)
            weights.update_running_max(self.maximum, keys, self.queries, self.keys is keys)
        return output, lse

    def symmetrised(self) -> Tensor:
        """Return the maximum of (A_ij + A_ji) / 2 for keys i and queries j >= i, (B, keys, queries), 0 where j < i.

        Half of the maximum of A_ji off the diagonal, and that of A_ii on it: A is lower triangular.
        """
        if self.maximum is None:
            raise RuntimeError("No watched layer ran: resolve the layers with LanguageModel.resolve.")
        key, query = self._positions(self.maximum.device)
        weights = self.maximum.masked_fill(query < key, float("-inf")).exp()
        return torch.where(query == key, weights, weights / 2)

    def _positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return positions of keys, (B or 1, keys, 1), and of queries, (queries,)."""
        is_slice = isinstance(self.keys, slice)
        keys = torch.arange(self.keys.start, self.keys.stop)[None] if is_slice else self.keys[:, None]
        return keys[..., None].to(device), torch.arange(self.queries.start, self.queries.stop, device=device)

    def _largest(self, weights: LogWeights, backward: LogWeights | None, keys: slice) -> Tensor:
        """Return the largest log weights of all heads, formed at once; differentiable."""
        formed = weights.form(keys=keys, queries=self.queries)
        if backward is not None:
            key, query = self._positions(formed.device)
            # Clamped, because the gradient of logaddexp is NaN where neither sees the other.
            formed = formed.clamp(min=_HIDDEN)
            other = backward.form(keys=self.queries, queries=keys).transpose(2, 4).clamp(min=_HIDDEN)
            formed = torch.where((query == key)[:, None, :, None], formed, torch.logaddexp(formed, other))
        return formed.amax(dim=(1, 3))


@dataclass(frozen=True)
class LogWeights:
    """Log weights of one layer, formed piece by piece. Shapes as in :class:`AttentionCall`."""

    query: Tensor
    key: Tensor
    lse: Tensor
    scale: float
    bias: Tensor | None
    softcap: float | None

    def at_keys(self, positions: Tensor) -> LogWeights:
        """Return those of one key in each row, (B,)."""
        bias = None if self.bias is None else _one_each(self.bias, positions, 3)
        return LogWeights(self.query, _one_each(self.key, positions, 2), self.lse, self.scale, bias, self.softcap)

    def at_queries(self, positions: Tensor) -> LogWeights:
        """Return those of one query in each row, (B,)."""
        bias = None if self.bias is None else _one_each(self.bias, positions, 2)
        query, lse = (_one_each(values, positions, 2) for values in (self.query, self.lse))
        return LogWeights(query, self.key, lse, self.scale, bias, self.softcap)

    def form(self, rows: slice = _ALL, groups: slice = _ALL, keys: slice = _ALL, queries: slice = _ALL) -> Tensor:
        """Form a part: (rows, groups, keys, H / G, queries)."""
        query = _by_group(self.query[rows, :, queries], self.key, groups)
        lse = _by_group(self.lse[rows, :, queries], self.key, groups).flatten(2, 3).flatten(0, 1)[:, None]
        key = self.key[rows, groups, keys].to(lse.dtype, memory_format=torch.contiguous_format)
        columns = query.to(lse.dtype, memory_format=torch.contiguous_format).flatten(2, 3).flatten(0, 1).mT
        # Subtracted within the product, which saves a pass over the rectangle.
        beta, scale = (-1, self.scale) if self.softcap is None else (0, self.scale / self.softcap)
        scores = torch.baddbmm(lse, key.flatten(0, 1), columns, beta=beta, alpha=scale)
        if self.softcap is not None:
            scores = scores.tanh() * self.softcap - lse
        weights = scores.unflatten(0, query.shape[:2]).unflatten(3, query.shape[2:4])
        if self.bias is None:
            return weights
        bias = self.bias[rows if self.bias.shape[0] > 1 else _ALL, :, queries, keys]
        return weights + _by_group(bias, self.key, groups).permute(0, 1, 4, 2, 3)

    def update_running_max(self, maximum: Tensor, keys: slice, queries: slice, keys_are_positions: bool) -> None:
        """Fold the weights of all heads into a maximum (B, keys, queries), in place, in parts that fit a cache.

        Where keys are positions, entries with query < key may be left as they are.
        """
        block = min(_KEY_BLOCK, keys.stop - keys.start)
        (batch, heads, _, size), group_count = self.query.shape, self.key.shape[1]
        scratch = _SCRATCH.get(maximum.device.type, _SCRATCH_ACCELERATOR)
        bytes_a_group = max(1, 4 * (heads // group_count) * maximum.shape[2] * max(block, size))
        rows_at_once = min(batch, max(1, scratch // bytes_a_group))
        groups_at_once = max(1, scratch // (bytes_a_group * rows_at_once))
        for row in range(0, batch, rows_at_once):
            rows = slice(row, row + rows_at_once)
            for start in range(keys.start, keys.stop, block):
                part = slice(start, min(start + block, keys.stop))
                skipped = max(0, start - queries.start) if keys_are_positions else 0
                target = maximum[rows, start - keys.start : part.stop - keys.start, skipped:]
                for group in range(0, group_count, groups_at_once):
                    groups = slice(group, group + groups_at_once)
                    formed = self.form(rows, groups, part, slice(queries.start + skipped, queries.stop))
                    is_one = formed.shape[1] * formed.shape[3] == 1
                    torch.maximum(target, formed[:, 0, :, 0] if is_one else formed.amax(dim=(1, 3)), out=target)


def _by_group(values: Tensor, key: Tensor, part: slice = _ALL) -> Tensor:
    """Return (B, H, ...) as (B, G, H / G, ...); (B, 1, ...) stays one for all heads."""
    return values.unflatten(1, (key.shape[1], -1))[:, part] if values.shape[1] > 1 else values[:, :, None]


def _one_each(values: Tensor, positions: Tensor, dim: int) -> Tensor:
    """Return one entry of a dimension for each row: (B or 1, ..., N, ...) and (B,) to (B, ..., 1, ...)."""
    shape = [len(positions), *values.shape[1:]]
    index = positions.to(values.device).view(-1, *[1] * (len(shape) - 1))
    return values.expand(shape).gather(dim, index.expand([*shape[:dim], 1, *shape[dim + 1 :]]))


def _wide(values: Tensor) -> Tensor:
    """Return values in float32 at least, to be summed."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
