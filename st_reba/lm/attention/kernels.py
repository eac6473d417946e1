"""Scaled dot-product attention that also returns its log-sum-exp.

PyTorch's fused kernels compute the log-sum-exp of every query, and ``scaled_dot_product_attention`` drops it. Two
public functions return it. ``varlen_attn`` runs on CUDA alone. ``flex_attention`` is fused only where it is compiled;
else it forms all scores, as the plain computation does, so it is not used. Then there are the operators below the
first, which are private: this is the only file that names them. A kernel is used only after it has agreed with the
plain computation on a small problem of the same kind (device, dtype, head size, grouping), public ones first; where
none does, the plain computation is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..precision import widened, without_autocast

# Bytes of the scores that are formed at a time where attention is written out: on a CPU what its caches hold, on an
# accelerator enough to fill it.
_SCORE_BYTES = {"cpu": 2**22}
_SCORE_BYTES_ACCELERATOR = 2**28

#: (query, key, value, bias, causal, scale) -> (output, log-sum-exp)
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]


def attention_with_lse(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention and the log of each softmax's denominator. Not differentiable through the latter.

    Args:
        query: (B, H, N, d).
        key: (B, G, N, d), with G key-value heads; H is a multiple of G.
        value: (B, G, N, d).
        bias: Added to the scaled scores, broadcastable to (B, H, N, N), or None.
        causal: Whether query j attends to keys 0..j only (then ``bias`` must be None).
        scale: Factor on the dot products.

    Returns:
        The output (B, H, N, d) in the dtype of ``query``, and the log-sum-exp (B, H, N) in float32, or float64 where
        ``query`` is.
    """
    groups = query.shape[1] // key.shape[1]
    kernel = trusted_kernel(query.device.type, query.dtype, query.shape[-1], groups, bias is not None)
    return kernel(query, key, value, bias, causal, scale)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The public fused attention for the output; the log-sum-exp from the scores, a few heads at a time."""
    groups = query.shape[1] // key.shape[1]
    output = scaled_dot_product_attention(
        query,
        key if groups == 1 else key.repeat_interleave(groups, dim=1),
        value if groups == 1 else value.repeat_interleave(groups, dim=1),
        attn_mask=None if bias is None else bias.to(query.dtype),
        is_causal=causal,
        scale=scale,
    )
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril() if causal else None
    sums = []
    for part in group_slices(query, key):
        scores = widened(by_group(query, key, part)) @ widened(key[:, part, None]).mT * scale
        if bias is not None:
            scores += by_group(bias, key, part)
        if visible is not None:
            scores.masked_fill_(~visible, float("-inf"))
        sums.append(scores.logsumexp(dim=-1))
    return output, torch.cat(sums, dim=1).flatten(1, 2)


def by_group(values: Tensor, key: Tensor, part: slice = slice(None)) -> Tensor:
    """(B, H, ...) as (B, G, H / G, ...), by the G key-value heads of ``key``, and a part of these.

    What is one for all heads, (B, 1, ...), stays so.
    """
    return values.unflatten(1, (key.shape[1], -1))[:, part] if values.shape[1] > 1 else values[:, :, None]


def group_slices(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Key-value heads whose scores are formed at a time."""
    groups = key.shape[1]
    of_a_group = 4 * len(query) * query.shape[1] // groups * query.shape[2] * key.shape[2]
    size = max(1, _SCORE_BYTES.get(query.device.type, _SCORE_BYTES_ACCELERATOR) // max(1, of_a_group))
    return (slice(first, first + size) for first in range(0, groups, size))


def _cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    mask = None if bias is None else bias.to(query.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The public one: the texts of a batch, all of one length, stand one behind the other."""
    if bias is not None:
        raise NotImplementedError("varlen_attn takes no bias")
    from torch.nn.attention import varlen

    batch, heads, length, _ = query.shape
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    # torch 2.11 has no such argument.
    grouped: dict[str, Any] = {"enable_gqa": True} if key.shape[1] < heads else {}
    found = varlen.varlen_attn(
        query, key, value, ends, ends, length, length, return_aux=varlen.AuxRequest(lse=True), scale=scale,
        window_size=(-1, 0 if causal else -1), **grouped,
    )  # fmt: skip
    output, lse = cast("tuple[Tensor, Tensor]", found)
    # It is said to have the tokens first; the operator below it has the heads first.
    lse = lse if lse.shape[0] == heads else lse.mT
    return output.unflatten(0, (batch, length)).transpose(1, 2), lse.unflatten(1, (batch, length)).transpose(0, 1)


def _cuda_flash(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if bias is not None:
        raise NotImplementedError("the CUDA flash kernel takes no bias")
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return output, lse[..., : query.shape[2]]


#: By device, those to be tried, the first first.
_CANDIDATES: dict[str, tuple[Kernel, ...]] = {"cpu": (_cpu_flash,), "cuda": (_varlen, _cuda_flash)}


@cache
def trusted_kernel(device_type: str, dtype: torch.dtype, head_size: int, groups: int, with_bias: bool) -> Kernel:
    """The first kernel for such inputs that exists and proves itself here, else :func:`plain_attention`.

    The answer is kept, so the dry run depends on nothing but these arguments: not on autocast, which would round the
    reference, nor on torch's default dtype.
    """
    with without_autocast(torch.device(device_type)):
        candidates = _CANDIDATES.get(device_type, ())
        agreeing = (
            kernel for kernel in candidates if _agrees(kernel, device_type, dtype, head_size, groups, with_bias)
        )
        return next(agreeing, plain_attention)


def _agrees(
    candidate: Kernel, device_type: str, dtype: torch.dtype, head_size: int, groups: int, with_bias: bool
) -> bool:
    """Whether a kernel gives what the plain computation does, to within its own precision, on a small problem."""
    length = 5
    generator = torch.Generator().manual_seed(0)

    def sample(heads: int) -> Tensor:
        drawn = torch.randn(2, heads, length, head_size, generator=generator, dtype=torch.float32)
        return drawn.to(device_type, dtype)

    query, key, value = sample(2 * groups), sample(2), sample(2)
    bias = None
    if with_bias:
        bias = torch.full((1, 1, length, length), float("-inf"), dtype=dtype, device=device_type).triu(1)
    scale = head_size**-0.5
    # The reference runs on wider copies: it has no rounding of its own.
    expected, expected_lse = plain_attention(
        widened(query), widened(key), widened(value), None if bias is None else widened(bias), bias is None, scale
    )
    try:
        output, lse = candidate(query, key, value, bias, bias is None, scale)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError, ImportError):
        return False
    tolerance = 8 * torch.finfo(dtype).eps
    return (
        (lse.dtype, lse.shape) == (expected_lse.dtype, expected_lse.shape)
        and torch.allclose(lse, expected_lse, rtol=tolerance, atol=tolerance)
        and torch.allclose(widened(output), expected, rtol=tolerance, atol=tolerance)
    )
