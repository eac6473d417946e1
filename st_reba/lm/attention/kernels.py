"""Attention weights formed piece by piece, and kernels, each used only where it has proved right on this machine.

PyTorch's fused kernels compute the log-sum-exp of every query, and ``scaled_dot_product_attention`` drops it. The
private operators below it are named in this file alone: of the public functions that return it, ``varlen_attn`` takes
texts of other shapes, on CUDA alone, and ``flex_attention`` forms all scores unless it is compiled. A kernel is used
after it has agreed with the explicit computation on a small problem of the same kind; otherwise that one is used.

On a GPU with Triton, :mod:`~st_reba.lm.attention.triton_kernel` replaces :func:`update_running_max`, where it has
agreed with it in float64.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ..passes import AttentionCall
from ..sizes import in_a_line

# Bytes of scores that are formed at a time: what the caches of a CPU hold, or what fills an accelerator.
_SCORE_BYTES = {"cpu": 2**22}
_SCRATCH_BYTES = {"cpu": 2**20}
_ACCELERATOR_BYTES = 2**28
# Keys are taken in blocks, because queries before the first key of a block do not matter.
_KEY_BLOCK = 128
# Log weight of a hidden key, with a finite gradient.
_HIDDEN = -1e4
_ALL = slice(None)


# Sums are taken in float32 at least, and in float64 in a float64 model. Half precision and autocast would round them.


def widen(values: Tensor) -> Tensor:
    """Return values in float32 at least, to be summed."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which ``torch.autocast`` computes products on a device here; None outside autocast."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Turn autocast off on a device within the block."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def weighted_sum(weights: Tensor, states: Tensor) -> Tensor:
    """Sum states (B, N, D) with weights (B, n, N): (B, n, D), in float32 at least."""
    with without_autocast(states.device):
        return torch.bmm(widen(weights.to(states.device)), widen(states))


@dataclass(frozen=True)
class LogWeights:
    """Log weights of one layer, formed piece by piece. Shapes as in :class:`~st_reba.lm.passes.AttentionCall`.

    Attributes:
        query: (B, H, N, d).
        key: (B, G, M, d).
        lse: (B, H, N).
        scale: Factor of the dot products.
        bias: Added to the scores, broadcastable to (B, H, N, M), or None.
        softcap: c of c * tanh(score / c), or None.
        backward: The same layer, if it attends both ways: log(A_ij + A_ji) takes the place of log A_ji off the
            diagonal, so that all layers may be halved alike later.
    """

    query: Tensor
    key: Tensor
    lse: Tensor
    scale: float
    bias: Tensor | None
    softcap: float | None
    backward: LogWeights | None = None

    @classmethod
    def of(cls, call: AttentionCall, lse: Tensor) -> Self:
        """Return those of a call of attention."""
        return cls(call.query, call.key, lse, call.scale, call.bias, call.softcap)

    def of_last_keys(self, count: int) -> Self:
        """Return those of the last keys."""
        return replace(self, key=self.key[:, :, -count:], bias=None if self.bias is None else self.bias[..., -count:])

    def at_queries(self, positions: Tensor) -> Self:
        """Return those of one query in each row, (B,)."""
        bias = None if self.bias is None else one_each(self.bias, positions, 2)
        query, lse = (one_each(values, positions, 2) for values in (self.query, self.lse))
        return replace(self, query=query, lse=lse, bias=bias)

    def form(self, rows: slice = _ALL, groups: slice = _ALL, keys: slice = _ALL, queries: slice = _ALL) -> Tensor:
        """Form a part: (rows, groups, keys, H / G, queries). Slices have a start and a stop if ``backward`` is set."""
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
        if self.bias is not None:
            bias = self.bias[rows if self.bias.shape[0] > 1 else _ALL, :, queries, keys]
            weights = weights + _by_group(bias, self.key, groups).permute(0, 1, 4, 2, 3)
        if self.backward is None:
            return weights
        # Clamped, because the gradient of logaddexp is NaN where neither sees the other.
        weights = weights.clamp(min=_HIDDEN)
        backward = self.backward.form(rows, groups, queries, keys).transpose(2, 4).clamp(min=_HIDDEN)
        key_at, query_at = (torch.arange(part.start, part.stop, device=weights.device) for part in (keys, queries))
        return torch.where(key_at[:, None, None] == query_at, weights, torch.logaddexp(weights, backward))


def update_running_max(weights: LogWeights, keys: slice, queries: slice, maximum: Tensor) -> None:
    """Fold the weights of all heads into a maximum (B, keys, queries), in place, in parts that fit a cache.

    Entries with query < key may be left as they are.
    """
    block = min(_KEY_BLOCK, keys.stop - keys.start)
    (batch, heads, _, size), group_count = weights.query.shape, weights.key.shape[1]
    scratch = _SCRATCH_BYTES.get(maximum.device.type, _ACCELERATOR_BYTES)
    bytes_a_group = max(1, 4 * (heads // group_count) * maximum.shape[2] * max(block, size))
    rows_at_once = min(batch, max(1, scratch // bytes_a_group))
    groups_at_once = max(1, scratch // (bytes_a_group * rows_at_once))
    for row in range(0, batch, rows_at_once):
        rows = slice(row, row + rows_at_once)
        for start in range(keys.start, keys.stop, block):
            part = slice(start, min(start + block, keys.stop))
            skipped = max(0, start - queries.start)
            target = maximum[rows, start - keys.start : part.stop - keys.start, skipped:]
            for group in range(0, group_count, groups_at_once):
                groups = slice(group, group + groups_at_once)
                formed = weights.form(rows, groups, part, slice(queries.start + skipped, queries.stop))
                is_one = formed.shape[1] * formed.shape[3] == 1
                torch.maximum(target, formed[:, 0, :, 0] if is_one else formed.amax(dim=(1, 3)), out=target)


def _by_group(values: Tensor, key: Tensor, part: slice = _ALL) -> Tensor:
    """Return (B, H, ...) as (B, G, H / G, ...); (B, 1, ...) stays one for all heads."""
    return values.unflatten(1, (key.shape[1], -1))[:, part] if values.shape[1] > 1 else values[:, :, None]


def one_each(values: Tensor, positions: Tensor, dim: int) -> Tensor:
    """Return one entry of a dimension for each row: (B or 1, ..., N, ...) and (B,) to (B, ..., 1, ...)."""
    shape = [len(positions), *values.shape[1:]]
    index = positions.to(values.device).view(-1, *[1] * (len(shape) - 1))
    return values.expand(shape).gather(dim, index.expand([*shape[:dim], 1, *shape[dim + 1 :]]))


# Attention with its log-sum-exp

#: Output and log-sum-exp of a call. Its mask is None, or is added to the scores, has the position bias, and hides later
#: keys where ``causal`` would. The log-sum-exp of the fused kernels has no gradient.
Kernel = Callable[[AttentionCall], tuple[Tensor, Tensor]]


def explicit_attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Compute attention by its definition, rounded where eager attention is, a few heads at a time; differentiable.

    Args:
        call: As for any :data:`Kernel`.

    Returns:
        The output (B, H, N, e) in the dtype of the queries, and the log-sum-exp (B, H, N) in float32, or float64 if
        they are.
    """
    query, key, groups = call.query, call.key, call.key.shape[1]
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    bytes_a_group = 4 * len(query) * query.shape[1] // groups * later.numel()
    size = max(1, _SCORE_BYTES.get(query.device.type, _ACCELERATOR_BYTES) // max(1, bytes_a_group))
    outputs, sums = [], []
    for first in range(0, groups, size):
        part = slice(first, first + size)
        # In place where no gradient needs the former values.
        scores = (_by_group(query, key, part) @ key[:, part, None].mT).mul_(call.scale)
        if call.softcap is not None:
            scores = scores.div_(call.softcap).tanh() * call.softcap
        scores = widen(scores)
        if call.mask is not None:
            scores = scores + _by_group(call.mask, key, part)
        if call.causal:
            scores.masked_fill_(later, float("-inf"))
        weights = scores.softmax(dim=-1)
        # The largest weight is exp(its score - lse), which saves a second sum.
        lse = scores.amax(dim=-1) - weights.amax(dim=-1).log()
        if call.sinks is not None:
            alone, lse = lse, torch.logaddexp(lse, _by_group(call.sinks[None], key, part)[0, ..., None].to(lse))
            weights = weights * (alone - lse).exp()[..., None]
        weights = nn.functional.dropout(weights.to(query.dtype), call.dropout)
        outputs.append((weights @ call.value[:, part, None]).flatten(1, 2))
        sums.append(lse.flatten(1, 2))
    return torch.cat(outputs, dim=1), torch.cat(sums, dim=1)


def _cpu_flash(call: AttentionCall) -> tuple[Tensor, Tensor]:
    mask = None if call.mask is None else call.mask.to(call.query.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        call.query, call.key, call.value, 0.0, call.causal, attn_mask=mask, scale=call.scale
    )


def _cuda_flash(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Ignore the mask, and so fail a trial with one."""
    heads_a_group = call.query.shape[1] // call.key.shape[1]
    key, value = (states.repeat_interleave(heads_a_group, dim=1) for states in (call.key, call.value))
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        call.query, key, value, 0.0, call.causal, scale=call.scale
    )
    return output, lse[..., : call.query.shape[2]]


#: Kernel to try on each kind of device.
_FUSED: dict[str, Kernel] = {"cpu": _cpu_flash, "cuda": _cuda_flash}


@cache
def trusted_kernel(device_type: str, dtype: torch.dtype, head_size: int, groups: int, with_mask: bool) -> Kernel:
    """Return the fused kernel for such inputs if it exists and proves right here, else :func:`explicit_attention`.

    The answer is kept, so the trial depends on these arguments alone: neither on autocast nor on the default dtype.

    Raises:
        torch.cuda.OutOfMemoryError: If there is no memory for the trial.
    """
    kernel = _FUSED.get(device_type)
    if kernel is None:
        return explicit_attention
    sample, tolerance = _sampling(torch.device(device_type)), 8 * torch.finfo(dtype).eps
    query, key, value = (sample(2, heads, 5, head_size).to(dtype) for heads in (2 * groups, 2, 2))
    mask = query.new_full((1, 1, 5, 5), float("-inf")).triu(1) if with_mask else None
    call = AttentionCall(0, query, key, value, mask, mask is None, head_size**-0.5)
    with without_autocast(torch.device(device_type)):
        # In float32, so that the reference has no rounding of its own.
        expected = explicit_attention(replace(call, query=widen(query), key=widen(key), value=widen(value)))
        try:
            result = kernel(call)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError, TypeError, ValueError):
            return explicit_attention
    is_right = result[1].dtype == expected[1].dtype and _agree(result, expected, tolerance, tolerance)
    return kernel if is_right else explicit_attention


def _sampling(device: torch.device) -> Callable[..., Tensor]:
    """Return a function that draws float32 tensors of a shape, the same ones on every device."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float32).to(device)


def _agree(result: Sequence[Tensor], expected: Sequence[Tensor], rtol: float, atol: float) -> bool:
    return all(
        ours.shape == theirs.shape and torch.allclose(ours.to(theirs.dtype), theirs, rtol=rtol, atol=atol)
        for ours, theirs in zip(result, expected, strict=True)
    )


# The running maximum

#: Like :func:`update_running_max`.
Fold = Callable[[LogWeights, slice, slice, Tensor], None]

_FOLD_DEVICES = {"cuda"}
_FOLD_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

# For log weights: ten times the difference between float32 sums of another order, a tenth of that of TF32.
_FOLD_TOLERANCE = 2**-15

# Problem of the trial: rows of odd lengths, several blocks of keys and queries.
_ROWS, _TOKENS, _KEYS = 8, 214, slice(3, 104)
_QUERIES = slice(3, _TOKENS)


class FoldKind(NamedTuple):
    """Properties for which a kernel is compiled, or may fail."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    head_size: int
    softcap: bool
    #: Dtype of the bias, and whether each head has its own; None if there is no bias.
    bias: tuple[torch.dtype, bool] | None


def fold_kernel(weights: LogWeights) -> Fold | None:
    """Return the Triton kernel for the running maximum of this layer, if there is one and it proves right."""
    query = weights.query
    bias = None if weights.bias is None else (weights.bias.dtype, weights.bias.shape[1] > 1)
    dtypes = {query.dtype, bias[0]} if bias else {query.dtype}
    if query.device.type not in _FOLD_DEVICES or weights.backward is not None or not dtypes <= _FOLD_DTYPES:
        return None
    kind = FoldKind(
        query.device, query.dtype, query.shape[1], weights.key.shape[1], query.shape[3],
        weights.softcap is not None, bias,
    )  # fmt: skip
    try:
        return trusted_fold(kind)
    except torch.cuda.OutOfMemoryError:
        # The memory is full now: the next batch tries again.
        return None


@cache
def trusted_fold(kind: FoldKind) -> Fold | None:
    """Return the kernel for :func:`fold_kernel`, tried once for each kind.

    Raises:
        torch.cuda.OutOfMemoryError: If there is no memory for the trial.
    """
    try:
        from .triton_kernel import update_running_max as kernel

        with without_autocast(kind.device):
            if _fold_agrees(kernel, kind):
                return kernel
        reason = "it gives other numbers than PyTorch's operations"
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # no compiler, too little memory on the chip, a GPU that Triton does not know
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "triton":
            return None
        reason = f"it fails with {in_a_line(error)}"
    problem = f"The Triton kernel for ReBA's running maximum is not used on {kind.device}, because {reason}."
    advice = "PyTorch's operations replace it: the numbers are the same, and it takes more time."
    warnings.warn(f"{problem} {advice}", stacklevel=2)
    return None


def _fold_agrees(kernel: Fold, kind: FoldKind) -> bool:
    """Return whether a kernel gives what :func:`update_running_max` gives in float64, on two layers."""
    sample = _sampling(kind.device)
    # As most architectures make them: the heads of a token side by side.
    query, key = (
        sample(_ROWS, _TOKENS, heads, kind.head_size).to(kind.dtype).transpose(1, 2)
        for heads in (kind.heads, kind.groups)
    )
    bias = None
    if kind.bias is not None:
        dtype, of_each_head = kind.bias
        # A sliding window.
        outside = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=kind.device).tril(-101)
        bias = sample(1, kind.heads if of_each_head else 1, _TOKENS, _TOKENS)
        bias = bias.masked_fill(outside, float("-inf")).to(dtype)
    lse = sample(_ROWS, kind.heads, _TOKENS)
    layer = LogWeights(query, key, lse, kind.head_size**-0.5, bias, 2.0 if kind.softcap else None)
    wide = replace(layer, query=layer.query.double(), key=layer.key.double(), lse=lse.double())
    result = lse.new_full((_ROWS, _KEYS.stop - _KEYS.start, _QUERIES.stop - _QUERIES.start), float("-inf"))
    expected = result.double()
    for update, of_layer, maximum in ((kernel, layer, result), (update_running_max, wide, expected)):
        for one in (of_layer, replace(of_layer, lse=of_layer.lse.flip(1))):
            update(one, _KEYS, _QUERIES, maximum)
    return _agree([result.triu()], [expected.triu()], 0, _FOLD_TOLERANCE)
