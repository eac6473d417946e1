"""One kernel for the running maximum over the heads of a layer, where it has proved right and faster.

On a GPU with Triton, :mod:`~st_reba.lm.attention.triton_kernel` can take the place of the same in torch's operations.
For each kind of layer on each device the two run once on a small problem, at the first batch that asks: the kernel is
used from then on if it agreed with the computation in float64 and took less time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from ..precision import without_autocast
from .weights import QueryKeySource, WeightSource

#: (source, keys, queries, maximum, in_order): folds the log weights of all heads into ``maximum`` (B, keys, queries),
#: in place. ``in_order``: whether keys stand where queries count from, so that entries with query < key do not matter.
Fold = Callable[[QueryKeySource, slice, slice, Tensor, bool], None]

_DEVICE_TYPES = {"cuda"}
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

# Of log weights: what float32 sums of another order differ by is a tenth of it, TF32 ten times as much.
_TOLERANCE = 2**-15

# The problem that is tried: texts of odd lengths, several blocks of keys and queries.
_TEXTS, _TOKENS, _KEYS = 8, 214, slice(3, 104)
_QUERIES = slice(3, _TOKENS)
_ROUNDS, _RUNS = 3, 10


class Kind(NamedTuple):
    """What a kernel is compiled for, or may fail for."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    head_size: int
    softcap: bool
    #: Of the bias, and whether each head has its own; None if there is none.
    bias: tuple[torch.dtype, bool] | None
    in_order: bool


def fused_fold(
    source: WeightSource, in_order: bool, instead_of: Fold
) -> Callable[[slice, slice, Tensor, bool], None] | None:
    """The kernel for this layer if there is one and it proved itself for such layers, else None.

    Args:
        source: The layer.
        in_order: Whether keys stand where queries count from; False with one key a text.
        instead_of: The same in torch's operations, which the kernel has to beat.
    """
    if source.device.type not in _DEVICE_TYPES or not isinstance(source, QueryKeySource):
        return None
    bias = source.bias
    if source.query.dtype not in _DTYPES or (bias is not None and bias.dtype not in _DTYPES):
        return None
    kind = Kind(
        source.device, source.query.dtype, source.heads, source.key.shape[1], source.head_size,
        source.softcap is not None, None if bias is None else (bias.dtype, bias.shape[1] > 1), in_order,
    )  # fmt: skip
    fold = trusted_fold(kind, instead_of)
    return None if fold is None else partial(fold, source)


@cache
def trusted_fold(kind: Kind, instead_of: Fold) -> Fold | None:
    """The answer to :func:`fused_fold`, found once for each kind."""
    try:
        fold = _triton_fold()
        with without_autocast(kind.device):
            source, keys = _problem(kind)
            trusted = _agrees(fold, source, keys, kind, instead_of) and _faster(fold, source, keys, kind, instead_of)
    except Exception:
        # No Triton, no compiler, too little memory on the chip, a GPU that it does not know: whatever a compiler may
        # stumble over, there is the other way.
        return None
    return fold if trusted else None


def _triton_fold() -> Fold:
    from .triton_kernel import fold

    return fold


def _problem(kind: Kind) -> tuple[QueryKeySource, slice]:
    """A layer of that kind, and which of its keys are asked for."""
    generator = torch.Generator().manual_seed(0)

    def sample(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    def states(heads: int) -> Tensor:
        """As most architectures make them: the heads of a token side by side."""
        return sample(_TEXTS, _TOKENS, heads, kind.head_size).to(kind.device, kind.dtype).transpose(1, 2)

    bias = None
    if kind.bias is not None:
        dtype, of_each_head = kind.bias
        bias = sample(1, kind.heads if of_each_head else 1, _TOKENS, _TOKENS)
        # A sliding window.
        outside = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).triu(-100).logical_not()
        bias = bias.masked_fill_(outside, float("-inf")).to(kind.device, dtype)
    source = QueryKeySource(
        layer=0, query=states(kind.heads), key=states(kind.groups),
        log_sum_exp=sample(_TEXTS, kind.heads, _TOKENS).to(kind.device), scale=kind.head_size**-0.5, bias=bias,
        softcap=2.0 if kind.softcap else None,
    )  # fmt: skip
    if kind.in_order:
        return source, _KEYS
    return source.at_keys(torch.arange(_TEXTS, device=kind.device)), slice(0, 1)


def _folded(fold: Fold, source: QueryKeySource, keys: slice, in_order: bool) -> Tensor:
    """By two layers, so that there is something to be larger than."""
    shape = (source.batch, keys.stop - keys.start, _QUERIES.stop - _QUERIES.start)
    maximum = torch.full(shape, float("-inf"), dtype=source.dtype, device=source.device)
    for layer in (source, replace(source, log_sum_exp=source.log_sum_exp.flip(1))):
        fold(layer, keys, _QUERIES, maximum, in_order)
    return maximum


def _agrees(fold: Fold, source: QueryKeySource, keys: slice, kind: Kind, instead_of: Fold) -> bool:
    wide = replace(
        source, query=source.query.double(), key=source.key.double(), log_sum_exp=source.log_sum_exp.double()
    )
    expected = _folded(instead_of, wide, keys, kind.in_order)
    found = _folded(fold, source, keys, kind.in_order).double()
    if kind.in_order:
        found, expected = found.triu(), expected.triu()
    return torch.allclose(found, expected, rtol=0, atol=_TOLERANCE)


def _faster(fold: Fold, source: QueryKeySource, keys: slice, kind: Kind, instead_of: Fold) -> bool:
    synchronize = torch.get_device_module(kind.device).synchronize
    shortest = {fold: float("inf"), instead_of: float("inf")}
    # The first round warms up; the two take turns, so that a busy machine is busy for both.
    for measured in range(_ROUNDS + 1):
        for each in shortest:
            synchronize()
            start = perf_counter()
            for _ in range(_RUNS):
                _folded(each, source, keys, kind.in_order)
            synchronize()
            if measured:
                shortest[each] = min(shortest[each], perf_counter() - start)
    return shortest[fold] < shortest[instead_of]
