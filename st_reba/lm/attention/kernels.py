"""Kernels that take the place of operations written out, each only where it has proved right on this machine.

Attention with its log-sum-exp: PyTorch's fused kernels compute the log-sum-exp of every query, and
``scaled_dot_product_attention`` drops it. Two public functions return it. ``varlen_attn`` runs on CUDA alone.
``flex_attention`` is fused only where it is compiled; else it forms all scores, as the plain computation does, so it is
not used. Then there are the operators below the first, which are private: this is the only file that names them. A
kernel is used only after it has agreed with the plain computation on a small problem of the same kind (device, dtype,
head size, grouping), public ones first; where none does, the plain computation is used.

The running maximum over the heads of a layer: on a GPU with Triton, :mod:`~st_reba.lm.attention.triton_kernel` takes
the place of :func:`~st_reba.lm.attention.weights.fold` where it has agreed with it in float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..backbone import for_summing, without_autocast
from ..sizes import in_a_line
from .weights import LayerWeights, by_group, fold

# Bytes of the scores that are formed at a time where attention is written out: on a CPU what its caches hold, on an
# accelerator enough to fill it.
_SCORE_BYTES = {"cpu": 2**22}
_SCORE_BYTES_ACCELERATOR = 2**28

#: Softmax attention and the log of each softmax's denominator, of (query, key, value, bias, causal, scale) as for
#: :func:`explicit_attention`. It is not differentiable through the latter.
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention written out, rounded where eager attention is, a few heads at a time; differentiable.

    Args:
        query: (B, H, N, d).
        key: (B, G, N, d), with G key-value heads; H is a multiple of G.
        value: (B, G, N, d).
        bias: Added to the scaled scores, broadcastable to (B, H, N, N), or None.
        causal: Whether query j attends to keys 0..j only (then ``bias`` must be None).
        scale: Factor on the dot products.
        softcap: c of c * tanh(score / c), or None.
        sinks: (H,), one more logit of each head, that takes weight and gives no value; or None.
        dropout: The share of the weights that is left out.

    Returns:
        The output (B, H, N, d) in the dtype of ``query``, and the log of each softmax's denominator (B, H, N) in
        float32, or float64 where ``query`` is.
    """
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    groups = key.shape[1]
    of_a_group = 4 * len(query) * query.shape[1] // groups * later.numel()
    size = max(1, _SCORE_BYTES.get(query.device.type, _SCORE_BYTES_ACCELERATOR) // max(1, of_a_group))
    outputs, sums = [], []
    for first in range(0, groups, size):
        part = slice(first, first + size)
        # In place where no gradient needs what was there.
        scores = (by_group(query, key, part) @ key[:, part, None].mT).mul_(scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh() * softcap
        scores = for_summing(scores)
        if bias is not None:
            scores = scores + by_group(bias, key, part)
        if causal:
            scores.masked_fill_(later, float("-inf"))
        weights = scores.softmax(dim=-1)
        # The largest weight is exp(its score - lse): no second sum over all of them.
        lse = scores.amax(dim=-1) - weights.amax(dim=-1).log()
        if sinks is not None:
            alone, lse = lse, torch.logaddexp(lse, by_group(sinks[None], key, part)[0, ..., None].to(lse))
            weights = weights * (alone - lse).exp()[..., None]
        weights = weights.to(query.dtype)
        if dropout > 0:
            weights = nn.functional.dropout(weights, dropout)
        outputs.append((weights @ value[:, part, None]).flatten(1, 2))
        sums.append(lse.flatten(1, 2))
    return torch.cat(outputs, dim=1), torch.cat(sums, dim=1)


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
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return output, lse[..., : query.shape[2]]


#: By device, those to be tried, the first first. Those of CUDA leave a bias out, and so do not pass a trial with one.
_CANDIDATES: dict[str, tuple[Kernel, ...]] = {"cpu": (_cpu_flash,), "cuda": (_varlen, _cuda_flash)}


@cache
def trusted_kernel(device_type: str, dtype: torch.dtype, head_size: int, groups: int, with_bias: bool) -> Kernel:
    """The first kernel for such inputs that exists and proves itself here, else :func:`explicit_attention`.

    The answer is kept, so the trial depends on nothing but these arguments: not on autocast, which would round the
    reference, nor on torch's default dtype.

    Raises:
        torch.cuda.OutOfMemoryError: If there is no memory for the trial, which says nothing about the kernel.
    """
    sample = _sampling(torch.device(device_type))
    query, key, value = (sample(2, heads, 5, head_size).to(dtype) for heads in (2 * groups, 2, 2))
    bias = query.new_full((1, 1, 5, 5), float("-inf")).triu(1) if with_bias else None
    scale = head_size**-0.5
    tolerance = 8 * torch.finfo(dtype).eps
    with without_autocast(torch.device(device_type)):
        # The reference runs on wider copies: it has no rounding of its own.
        wide = [for_summing(states) for states in (query, key, value)]
        expected = explicit_attention(wide[0], wide[1], wide[2], bias, bias is None, scale)
        for kernel in _CANDIDATES.get(device_type, ()):
            try:
                found = kernel(query, key, value, bias, bias is None, scale)
            except torch.cuda.OutOfMemoryError:
                raise
            except (RuntimeError, AttributeError, TypeError, ValueError, ImportError):
                continue
            if found[1].dtype == expected[1].dtype and _agree(found, expected, tolerance, tolerance):
                return kernel
    return explicit_attention


def _sampling(device: torch.device) -> Callable[..., Tensor]:
    """Draws float32 tensors of a shape, the same ones on every device."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float32).to(device)


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float, atol: float) -> bool:
    return all(
        ours.shape == theirs.shape and torch.allclose(ours.to(theirs.dtype), theirs, rtol=rtol, atol=atol)
        for ours, theirs in zip(found, expected, strict=True)
    )


#: As :func:`~st_reba.lm.attention.weights.fold`.
Fold = Callable[[LayerWeights, slice, slice, Tensor], None]

_FOLD_DEVICES = {"cuda"}
_FOLD_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

# Of log weights: what float32 sums of another order differ by is a tenth of it, TF32 ten times as much.
_FOLD_TOLERANCE = 2**-15

# The problem that is tried: texts of odd lengths, several blocks of keys and queries.
_TEXTS, _TOKENS, _KEYS = 8, 214, slice(3, 104)
_QUERIES = slice(3, _TOKENS)


class FoldKind(NamedTuple):
    """What a kernel for the running maximum is compiled for, or may fail for."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    head_size: int
    softcap: bool
    #: Of the bias, and whether each head has its own; None if there is none.
    bias: tuple[torch.dtype, bool] | None
    keys_are_positions: bool


def fold_kernel(weights: LayerWeights) -> Fold | None:
    """The kernel for the running maximum of this layer if there is one and it proved itself for such layers."""
    query = weights.query
    bias = None if weights.bias is None else (weights.bias.dtype, weights.bias.shape[1] > 1)
    dtypes = {query.dtype, bias[0]} if bias else {query.dtype}
    if query.device.type not in _FOLD_DEVICES or weights.backward is not None or not dtypes <= _FOLD_DTYPES:
        return None
    kind = FoldKind(
        query.device, query.dtype, query.shape[1], weights.key.shape[1], query.shape[3],
        weights.softcap is not None, bias, weights.positions is None,
    )  # fmt: skip
    try:
        return trusted_fold(kind)
    except torch.cuda.OutOfMemoryError:
        # The memory is full now, which says nothing about the kernel: the next batch asks again.
        return None


@cache
def trusted_fold(kind: FoldKind) -> Fold | None:
    """The answer to :func:`fold_kernel`, found once for each kind.

    Raises:
        torch.cuda.OutOfMemoryError: If there is no memory for the trial.
    """
    try:
        from .triton_kernel import fold as kernel

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
    warnings.warn(
        f"The Triton kernel for ReBA's running maximum is not used on {kind.device}, because {reason}. PyTorch's "
        "operations take its place: the numbers are the same, and it takes more time.",
        stacklevel=2,
    )
    return None


def _fold_agrees(kernel: Fold, kind: FoldKind) -> bool:
    """Whether a kernel gives what :func:`fold` does in float64, by two layers, of which one may be the larger."""
    sample = _sampling(kind.device)
    # As most architectures make them: the heads of a token side by side.
    query, key = (
        sample(_TEXTS, _TOKENS, heads, kind.head_size).to(kind.dtype).transpose(1, 2)
        for heads in (kind.heads, kind.groups)
    )
    bias = None
    if kind.bias is not None:
        dtype, of_each_head = kind.bias
        # A sliding window.
        outside = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=kind.device).tril(-101)
        bias = sample(1, kind.heads if of_each_head else 1, _TOKENS, _TOKENS)
        bias = bias.masked_fill(outside, float("-inf")).to(dtype)
    lse = sample(_TEXTS, kind.heads, _TOKENS)
    layer = LayerWeights(0, query, key, lse, kind.head_size**-0.5, bias, 2.0 if kind.softcap else None)
    keys = _KEYS
    if not kind.keys_are_positions:
        layer, keys = layer.at_keys(torch.arange(_TEXTS)), slice(0, 1)
    wide = replace(layer, query=layer.query.double(), key=layer.key.double(), log_sum_exp=lse.double())
    found = lse.new_full((_TEXTS, keys.stop - keys.start, _QUERIES.stop - _QUERIES.start), float("-inf"))
    expected = found.double()
    for folding, of_layer, maximum in ((kernel, layer, found), (fold, wide, expected)):
        for each in (of_layer, replace(of_layer, log_sum_exp=of_layer.log_sum_exp.flip(1))):
            folding(each, keys, _QUERIES, maximum)
    if kind.keys_are_positions:
        found, expected = found.triu(), expected.triu()
    return _agree([found], [expected], 0, _FOLD_TOLERANCE)
