"""The attention weights of one layer, formed piece by piece and never kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..precision import summing_dtype, widened

# The log of a weight that is nothing, yet a number.
_NOTHING = -1e4


class WeightSource(Protocol):
    """The attention weights of one layer, to be formed piece by piece, in float32 or, in a float64 model, float64."""

    @property
    def layer(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def log_weights(self, texts: slice, head: int, keys: slice, queries: slice, out: Tensor | None = None) -> Tensor:
        """log p(query -> key), (texts, keys, queries), of ``dtype``; into ``out`` where one is given."""
        ...

    def at_keys(self, positions: Tensor) -> WeightSource:
        """The same layer with one key a text, ``positions`` (B,)."""
        ...


@dataclass(frozen=True)
class QueryKeySource:
    """Weights as exp(score - log-sum-exp), for the architectures that call the attention function.

    query (B, H, N, d), key (B, G, N, d) with G key-value heads, log_sum_exp (B, H, N), bias broadcastable to
    (B, H, N, N) or None, softcap as in Gemma 2: c * tanh(score / c).
    """

    layer: int
    query: Tensor
    key: Tensor
    log_sum_exp: Tensor
    scale: float
    bias: Tensor | None
    softcap: float | None

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def dtype(self) -> torch.dtype:
        return summing_dtype(self.query.dtype)

    def log_weights(self, texts: slice, head: int, keys: slice, queries: slice, out: Tensor | None = None) -> Tensor:
        key = widened(self.key[texts, head // (self.heads // self.key.shape[1]), keys])
        query = widened(self.query[texts, head, queries])
        negative_lse = -self.log_sum_exp[texts, head, None, queries]
        if self.softcap is None:
            result = torch.baddbmm(negative_lse, key, query.mT, alpha=self.scale, out=out)
        else:
            scores = torch.bmm(key, query.mT, out=out) * (self.scale / self.softcap)
            result = torch.add(negative_lse, scores.tanh(), alpha=self.softcap, out=out)
        if self.bias is None:
            return result
        bias = self.bias[texts if self.bias.shape[0] > 1 else slice(None), head if self.bias.shape[1] > 1 else 0]
        return torch.add(result, bias[:, queries, keys].mT, out=out)

    def at_keys(self, positions: Tensor) -> QueryKeySource:
        batch, heads, _, size = self.key.shape
        index = positions.view(batch, 1, 1, 1)
        key = self.key.gather(2, index.expand(batch, heads, 1, size))
        bias = self.bias
        if bias is not None:
            bias = bias.expand(batch, -1, -1, -1)
            bias = bias.gather(3, index.expand(*bias.shape[:3], 1))
        return replace(self, key=key, bias=bias)

    def at_queries(self, positions: Tensor) -> QueryKeySource:
        """The same layer with one query a text, ``positions`` (B,)."""
        batch, heads, _, size = self.query.shape
        index = positions.view(batch, 1, 1, 1)
        bias = self.bias
        if bias is not None:
            bias = bias.expand(batch, -1, -1, -1)
            bias = bias.gather(2, index.expand(*bias.shape[:2], 1, bias.shape[3]))
        return replace(
            self,
            query=self.query.gather(2, index.expand(batch, heads, 1, size)),
            log_sum_exp=self.log_sum_exp.gather(2, index[..., 0].expand(batch, heads, 1)),
            bias=bias,
        )

    def in_chunks(self, start: int, length: int, count: int) -> QueryKeySource:
        """The same layer within chunks from ``start`` on, each as a text of its own, (B * count) of them.

        What reaches beyond the end of the input has weights that mean nothing.
        """

        def cut(values: Tensor) -> Tensor:
            return split(values, 2, start, length, count).transpose(1, 2).flatten(0, 1)

        bias = self.bias
        if bias is not None:
            bias = diagonal_blocks(bias, start, length, count).expand(self.batch, *[-1] * 4).flatten(0, 1)
        return replace(self, query=cut(self.query), key=cut(self.key), log_sum_exp=cut(self.log_sum_exp), bias=bias)


@dataclass(frozen=True)
class SymmetrizedSource:
    """A layer that attends both ways, as a maximum over causal layers counts it.

    There the symmetrised (A_ij + A_ji) / 2 is half of A_ji off the diagonal, and A_ii on it. So that all layers are
    halved alike afterwards, this gives log(A_ij + A_ji) off the diagonal, and log A_ii on it.

    Attributes:
        forward: Weights of query j on key i.
        backward: Weights of query i on key j.
        positions: (B,) the key of each text, where there is one a text; None where keys are positions themselves.
    """

    forward: QueryKeySource
    backward: QueryKeySource
    positions: Tensor | None = None

    @property
    def layer(self) -> int:
        return self.forward.layer

    @property
    def batch(self) -> int:
        return self.forward.batch

    @property
    def heads(self) -> int:
        return self.forward.heads

    @property
    def device(self) -> torch.device:
        return self.forward.device

    @property
    def dtype(self) -> torch.dtype:
        return self.forward.dtype

    def log_weights(self, texts: slice, head: int, keys: slice, queries: slice, out: Tensor | None = None) -> Tensor:
        # Clamped, because the gradient of logaddexp is NaN where neither sees the other.
        forward = self.forward.log_weights(texts, head, keys, queries).clamp(min=_NOTHING)
        backward = self.backward.log_weights(texts, head, queries, keys).mT.clamp(min=_NOTHING)
        key = torch.arange(keys.start, keys.stop, device=self.device)[None]
        if self.positions is not None:
            key = self.positions[texts, None]
        query = torch.arange(queries.start, queries.stop, device=self.device)
        both = torch.where(key[..., None] == query, forward, torch.logaddexp(forward, backward))
        return both if out is None else out.copy_(both)

    def at_keys(self, positions: Tensor) -> SymmetrizedSource:
        return SymmetrizedSource(self.forward.at_keys(positions), self.backward.at_queries(positions), positions)


@dataclass(frozen=True)
class MapSource:
    """Weights as an architecture hands them out itself, with ``output_attentions=True``: weights (B, H, N, N)."""

    layer: int
    weights: Tensor

    @property
    def batch(self) -> int:
        return self.weights.shape[0]

    @property
    def heads(self) -> int:
        return self.weights.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        return summing_dtype(self.weights.dtype)

    def log_weights(self, texts: slice, head: int, keys: slice, queries: slice, out: Tensor | None = None) -> Tensor:
        # Clamped, because the gradient of log is infinite at the zeros of a causal map.
        weights = widened(self.weights[texts, head, queries, keys].mT).clamp(min=torch.finfo(self.dtype).tiny)
        return torch.log(weights, out=out)

    def at_keys(self, positions: Tensor) -> MapSource:
        index = positions.view(-1, 1, 1, 1)
        return replace(self, weights=self.weights.gather(3, index.expand(*self.weights.shape[:3], 1)))

    def in_chunks(self, start: int, length: int, count: int) -> MapSource:
        """As :meth:`QueryKeySource.in_chunks`."""
        return replace(self, weights=diagonal_blocks(self.weights, start, length, count).flatten(0, 1))


def split(values: Tensor, dim: int, start: int, length: int, count: int) -> Tensor:
    """Cut one dimension into ``count`` chunks from ``start`` on: (..., N, ...) to (..., count, length, ...).

    What lies behind the last chunk is left out, and zeros stand where it reaches beyond the end.
    """
    values = values.narrow(dim, start, min(count * length, values.shape[dim] - start))
    if missing := count * length - values.shape[dim]:
        shape = list(values.shape)
        shape[dim] = missing
        values = torch.cat([values, values.new_zeros(shape)], dim=dim)
    return values.unflatten(dim, (count, length))


def diagonal_blocks(values: Tensor, start: int, length: int, count: int) -> Tensor:
    """(B, H, N, N) to (B, count, H, length, length): what lies within each chunk."""
    for dim in (2, 4):
        values = split(values, dim, start, length, count)
    return values.diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)
