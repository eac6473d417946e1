"""Triton kernel for the running maximum over the heads of a layer. It needs ``triton``, so it is imported late.

Written out, each head's scores go to memory and come back for the maximum. Here a block of them stays in registers
until all heads have been seen, and is written once; products of half precision are taken by the units made for them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels import LogWeights

# Lengths, and strides that depend on them: the kernel is not compiled again for each.
_OF_LENGTHS = [
    "lse_text", "lse_head", "bias_text", "bias_head", "bias_query", "maximum_text", "maximum_key", "first_key",
    "key_count", "first_query", "query_count",
]  # fmt: skip


@triton.jit(do_not_specialize=_OF_LENGTHS)
def _kernel(
    query, query_text, query_head, query_token,
    key, key_text, key_head, key_token,
    lse, lse_text, lse_head,
    bias, bias_text, bias_head, bias_query, bias_key,
    maximum, maximum_text, maximum_key,
    first_key, key_count, first_query, query_count,
    scale, softcap,
    groups: tl.constexpr, sharing: tl.constexpr, head_size: tl.constexpr,
    key_block: tl.constexpr, query_block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Process one block of keys and queries of one text. Arguments named ``<tensor>_<dimension>`` are strides.

    ``groups`` key-value heads serve ``sharing`` heads each. ``width``: ``head_size``, rounded up to a power of two.
    """
    # 64 bits for offsets in whole tensors. Within the block 32 do, which saves registers.
    text = tl.program_id(0).to(tl.int64)
    query_start = tl.program_id(1).to(tl.int64) * query_block
    key_start = tl.program_id(2).to(tl.int64) * key_block
    # All queries are before all keys.
    if first_query + query_start + query_block <= first_key + key_start:
        return

    queries = tl.arange(0, query_block)[None, :]
    keys = tl.arange(0, key_block)[:, None]
    query_there = query_start + queries < query_count
    key_there = key_start + keys < key_count
    there = key_there & query_there
    maximum += text * maximum_text + key_start * maximum_key + query_start
    largest = tl.load(maximum + keys * maximum_key + queries, mask=there, other=float("-inf"))

    columns = tl.arange(0, width)
    query += text * query_text + (first_query + query_start) * query_token
    key += text * key_text + (first_key + key_start) * key_token
    lse += text * lse_text + first_query + query_start
    if bias is not None:
        bias += text * bias_text + (first_query + query_start) * bias_query + (first_key + key_start) * bias_key
    for group in range(groups):
        of_keys = tl.load(
            key + group * key_head + keys * key_token + columns[None, :],
            mask=key_there & (columns < head_size)[None, :],
            other=0.0,
        )
        for member in range(sharing):
            head = group * sharing + member
            of_queries = tl.load(
                query + head * query_head + queries * query_token + columns[:, None],
                mask=query_there & (columns < head_size)[:, None],
                other=0.0,
            )
            # Not in TF32: a log weight would be off in its third digit.
            scores = tl.dot(of_keys, of_queries, input_precision="ieee") * scale
            if softcap is not None:
                # tanh, which Triton has under another name on each kind of device.
                scores = softcap * (1 - 2 / (tl.exp(2 * scores) + 1))
            scores -= tl.load(lse + head * lse_head + queries, mask=query_there, other=0.0)
            if bias is not None:
                added = tl.load(bias + head * bias_head + queries * bias_query + keys * bias_key, mask=there, other=0.0)
                scores += added.to(tl.float32)
            # NaN stays NaN, as in torch: a query that sees no key at all has no weights.
            largest = tl.maximum(largest, scores, propagate_nan=tl.PropagateNan.ALL)
    tl.store(maximum + keys * maximum_key + queries, largest, mask=there)


def update_running_max(source: LogWeights, keys: slice, queries: slice, maximum: Tensor) -> None:
    """Fold the log weights of all heads into a running maximum, in place, in one launch.

    Args:
        source: In float32, bfloat16 or float16.
        keys: Key positions, n of them.
        queries: Query positions, Q of them.
        maximum: (B, n, Q), float32, queries side by side. Entries with query < key may be left as they are.
    """
    query, key, lse = (_dense(values) for values in (source.query, source.key, source.lse))
    bias = source.bias
    bias_strides: tuple[int, ...] = (0, 0, 0, 0)
    if bias is not None:
        bias_strides = bias.expand(*query.shape[:2], *bias.shape[2:]).stride()
    batch, heads, _, head_size = query.shape
    width = max(16, triton.next_power_of_2(head_size))
    key_count, query_count = maximum.shape[1:]
    block = 64 if width * query.element_size() <= 256 else 32
    # 16 is the least that a matrix unit takes.
    key_block = block if key_count > 16 else 16
    warps = 8 if key_block == 64 else 4
    grid = (batch, triton.cdiv(query_count, block), triton.cdiv(key_count, key_block))
    softcap = source.softcap
    with torch.cuda.device_of(maximum):
        _kernel[grid](
            query, *query.stride()[:3], key, *key.stride()[:3], lse, *lse.stride()[:2], bias, *bias_strides,
            maximum, *maximum.stride()[:2], keys.start, key_count, queries.start, query_count,
            source.scale / (softcap or 1), softcap,
            groups=key.shape[1], sharing=heads // key.shape[1], head_size=head_size,
            key_block=key_block, query_block=block, width=width, num_warps=warps, num_stages=2,
        )  # fmt: skip


def _dense(values: Tensor) -> Tensor:
    """Return the values contiguous in the last dimension, as the kernel reads them."""
    return values if values.stride(-1) == 1 else values.contiguous()
