"""The attention weights of one layer, formed piece by piece and never kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..precision import summing_dtype, widened
from .kernels import by_group

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
    def head_size(self) -> int: ...
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

    def of_all_heads(self, queries: slice) -> HeadsAtOnce:
        """The weights of these queries, formed for all heads at once."""
        ...


class HeadsAtOnce(Protocol):
    """The attention weights of some queries of one layer, formed for all heads at once.

    A head at a time is what a CPU's caches like. On an accelerator each operation has a price of its own, whatever its
    size.
    """

    def log_weights(self, texts: slice, keys: slice, first: int) -> Tensor:
        """log p(query -> key), (texts, G, keys, queries from ``first`` on, R), for G groups of R heads."""
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
    def head_size(self) -> int:
        return self.query.shape[3]

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def dtype(self) -> torch.dtype:
        return summing_dtype(self.query.dtype)

    def log_weights(self, texts: slice, head: int, keys: slice, queries: slice, out: Tensor | None = None) -> Tensor:
        key = widened(self.key[texts, head // (self.heads // self.key.shape[1]), keys])
        query = widened(self.query[texts, head, queries])
        lse = self.log_sum_exp[texts, head, None, queries]
        if self.softcap is None:
            result = torch.baddbmm(lse, key, query.mT, beta=-1, alpha=self.scale, out=out)
        else:
            scores = torch.bmm(key, query.mT, out=out) * (self.scale / self.softcap)
            result = torch.add(-lse, scores.tanh(), alpha=self.softcap, out=out)
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

    def of_all_heads(self, queries: slice) -> GroupedQueries:
        def grouped(values: Tensor) -> Tensor:
            """(B, H, N, ...) as (B, G, queries, R, ...)."""
            return by_group(values[:, :, queries], self.key).transpose(2, 3)

        def laid_out(values: Tensor) -> Tensor:
            """Anew, and widened, in one operation."""
            return torch.empty(values.shape, dtype=self.dtype, device=self.device).copy_(values)

        bias = None if self.bias is None else grouped(self.bias).permute(0, 1, 4, 2, 3)
        return GroupedQueries(
            laid_out(grouped(self.query)), laid_out(self.key), laid_out(grouped(self.log_sum_exp)), self.scale, bias,
            self.softcap,
        )  # fmt: skip

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
class GroupedQueries:
    """Queries that share a key side by side, so that one matrix product a group serves all its heads.

    query (B, G, Q, R, d) and key (B, G, M, d), in the dtype of sums; log_sum_exp (B, G, Q, R); bias broadcastable to
    (B, G, M, Q, R) or None.
    """

    query: Tensor
    key: Tensor
    log_sum_exp: Tensor
    scale: float
    bias: Tensor | None
    softcap: float | None

    def log_weights(self, texts: slice, keys: slice, first: int) -> Tensor:
        query = self.query[texts, :, first:]
        columns = query.flatten(2, 3).flatten(0, 1).mT
        lse = self.log_sum_exp[texts, :, None, first:]
        key = self.key[texts].flatten(0, 1)[:, keys]
        # The log-sum-exp is taken off in the product itself, which spares a pass over the rectangle.
        taken_off = -1 if self.softcap is None else 0
        scale = self.scale / (self.softcap or 1)
        product = torch.baddbmm(lse.flatten(3, 4).flatten(0, 1), key, columns, beta=taken_off, alpha=scale)
        result = product.unflatten(0, query.shape[:2]).unflatten(3, query.shape[2:4])
        if self.softcap is not None:
            result = result.tanh_().mul_(self.softcap).sub_(lse)
        if self.bias is None:
            return result
        bias = self.bias[texts if self.bias.shape[0] > 1 else slice(None), :, keys, first:]
        return result.add_(bias)


@dataclass(frozen=True)
class OneByOne:
    """Heads of any source, formed one by one and put side by side: G = 1."""

    source: WeightSource
    queries: slice

    def log_weights(self, texts: slice, keys: slice, first: int) -> Tensor:
        queries = slice(self.queries.start + first, self.queries.stop)
        heads = [self.source.log_weights(texts, head, keys, queries) for head in range(self.source.heads)]
        return torch.stack(heads, dim=-1)[:, None]


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
    def head_size(self) -> int:
        return self.forward.head_size

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

    def of_all_heads(self, queries: slice) -> OneByOne:
        return OneByOne(self, queries)


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
    def head_size(self) -> int:
        """None: there are no queries."""
        return 0

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

    def of_all_heads(self, queries: slice) -> OneByOne:
        return OneByOne(self, queries)

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
