"""The attention function that is registered with transformers as an attention implementation.

Attention maps are never stored. The weight with which query j attends to key i is exp(q_j k_i * scale - lse_j), and a
hook forms as few of them as it needs from queries, keys and log-sum-exp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from ..passes import AttentionCall, hooks_at_attention
from .kernels import autocast_dtype, explicit_attention, trusted_kernel, without_autocast

#: Name of the implementation in transformers.
ATTENTION = "st_reba"

# Tensors that models tell attention, and that its scores do not depend on.
_OF_NO_SCORES = {"cache_position", "input_ids", "position_ids"}

# Number of queries for which an accelerator may form all scores, as it does where heads share keys under a mask.
_FEW = 16


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
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the hooks of the active pass.

    Args:
        module: Attention of a layer.
        query: (B, H, N, d).
        key: (B, G, M, d).
        value: (B, G, M, d), or with heads of another size.
        attention_mask: As for :class:`~st_reba.lm.passes.AttentionCall`, as are the other arguments.
        dropout: See there.
        scaling: See there.
        is_causal: See there.
        softcap: See there.
        s_aux: Attention sinks.
        position_bias: See there.
        sliding_window: Length of the window, which the mask has already.
        indices: (B, N, k), the keys that sparse attention selects for each query. Models put them into the masks of
            transformers' own implementations alone.
        **kwargs: Ignored. Construction of a model proves that they change nothing.

    Returns:
        (B, N, H, d), and None for the weights.

    Raises:
        TypeError: If there is a tensor of a name that is not known, which may matter in longer texts alone.
    """
    if unknown := [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _OF_NO_SCORES]:
        raise TypeError(f"{type(module).__name__} gives attention {unknown}, which st_reba does not know.")
    hooks = hooks_at_attention(module)
    if indices is not None and attention_mask is not None:
        attention_mask = _selected_alone(attention_mask, indices)
    # transformers repeats cached keys for each head under a mask.
    behind_past = attention_mask is not None and query.shape[2] < key.shape[2]
    behind_past = behind_past and (query.device.type == "cpu" or query.shape[2] <= _FEW)
    if not hooks and not behind_past and softcap is None and s_aux is None and position_bias is None:
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal)
    dtype = autocast_dtype(query.device)
    if dtype is not None and query.dtype != torch.float64:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attention_mask is not None:
        attention_mask = attention_mask[: 1 if attention_mask.stride(0) == 0 else None, ..., : key.shape[2]]
    # That of Zamba's layers is one module, without a number.
    layer = getattr(module, "layer_idx", None)
    call = AttentionCall(
        -1 if layer is None else layer, query, key, value, attention_mask,
        getattr(module, "is_causal", True) if is_causal is None else is_causal,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window, softcap, s_aux, position_bias, dropout, module=module,
    )  # fmt: skip
    with without_autocast(query.device):
        for hook in hooks:
            hook.before_attention(call)
        readers = [hook for hook in hooks if hook.reads_weights]
        if readers or call.softcap is not None or call.sinks is not None:
            output, lse = with_log_sum_exp(call)
            for hook in readers:
                output, lse = hook.after_attention(call, output, lse)
        else:
            whole = _whole_mask(call)
            mask = call.mask if call.position_bias is None else whole.mask
            output = scaled_dot_product_attention(
                call.query, call.key, call.value, mask, call.dropout, whole.causal,
                scale=call.scale, enable_gqa=call.key.shape[1] < call.query.shape[1],
            )  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


def _selected_alone(mask: Tensor, indices: Tensor) -> Tensor:
    """Return a mask, (B, 1, N, M), without the keys that are not selected, (B, N, k)."""
    shape = (*indices.shape[:2], mask.shape[-1])
    selected = torch.zeros(shape, dtype=torch.bool, device=mask.device).scatter(-1, indices.long(), True)[:, None]
    return mask & selected if mask.dtype == torch.bool else mask.masked_fill(~selected, torch.finfo(mask.dtype).min)


def with_log_sum_exp(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the output of attention, (B, H, N, d), and the log-sum-exp of each query, (B, H, N)."""
    query, key, whole = call.query, call.key, _whole_mask(call)
    # The log-sum-exp of the fused kernels has no gradient, and they have no dropout with it.
    trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    needs_softmax = call.softcap is not None or call.sinks is not None or call.dropout > 0
    if needs_softmax or trains or call.value.shape[-1] != query.shape[-1]:
        return explicit_attention(whole)
    heads_a_group = query.shape[1] // key.shape[1]
    return trusted_kernel(query.device.type, query.dtype, query.shape[-1], heads_a_group, whole.mask is not None)(whole)


def _whole_mask(call: AttentionCall) -> AttentionCall:
    """Return a call whose mask is all that is added to the scores. It then hides later keys too, if they must be."""
    mask, causal = call.bias, call.causal and call.mask is None and call.query.shape[2] > 1
    if mask is not None and causal:
        mask, causal = mask + call.query.new_full(mask.shape[2:], float("-inf")).triu(1), False
    return replace(call, mask=mask, position_bias=None, causal=causal)


def register() -> None:
    """Make the implementation known to transformers, with the masks of ``sdpa``.

    torch.compile leaves the function out: a graph would keep the hooks of the pass in which it was traced.
    """
    AttentionInterface.register(ATTENTION, torch.compiler.disable(attention))
    AttentionMaskInterface.register(ATTENTION, AttentionMaskInterface()["sdpa"])
