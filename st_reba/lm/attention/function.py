"""Watching attention without storing it.

``output_attentions=True`` keeps every map of every layer: 2 GiB for one text of 1,024 tokens in a 7B model. Instead, an
attention function is registered with transformers under :data:`ATTENTION`. It computes what the architecture asks for
and shows each layer's queries, keys and log-sum-exp to the *observer* that is watching, if any; the weight with which
query j attends to key i is then exp(q_j . k_i * scale - lse_j), and an observer forms as few of them as it needs.

Nothing here knows a method. The observer, and what changes attention, are those of :class:`st_reba.lm.run.Pass`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from ..backbone import autocast_dtype, for_summing, without_autocast
from ..run import current
from .changes import Bidirectional
from .kernels import explicit_attention, trusted_kernel
from .weights import LayerWeights

ATTENTION = "st_reba"

#: Arguments an architecture may pass that change nothing in the softmax: the mask already says what they say.
HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)

# New tokens of which an accelerator may write out all scores, as it does where heads share keys under a mask.
_FEW = 16


def observable_attention(
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: query (B, H, N, d), key and value (B, G, M, d), output (B, N, H, d).

    ``softcap``, attention sinks (``s_aux``) and dropout while somebody watches take the explicit softmax. What is
    neither honoured nor in :data:`HARMLESS` is noted in a :class:`~st_reba.lm.attention.observers.Census`.
    """
    here = current().at(module)
    # Where anything is to happen here, it is a number.
    layer = cast(int, getattr(module, "layer_idx", None))
    if here.masking is not None:
        window = kwargs.get("sliding_window")
        attention_mask, is_causal = here.masking.mask(attention_mask, key.shape[2], window, key.device), False
    if here.hiding is not None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = here.hiding.mask(attention_mask, causal, key.shape[2], key.device)
        is_causal = False
    explicit = softcap is not None or s_aux is not None
    if here.census is not None:
        here.census.attentions[layer] = module
        here.census.explicit |= explicit
        here.census.unknown |= {name for name, given in kwargs.items() if given is not None and name not in HARMLESS}
    if here.observer is None and here.rerouting is None and not explicit and position_bias is None:
        is_behind = here.masking is not None and attention_mask is not None and query.shape[2] < key.shape[2]
        if is_behind and (query.device.type == "cpu" or query.shape[2] <= _FEW):
            # Behind a cache: where there is a mask, transformers repeats the cache for each head, in every layer.
            output = scaled_dot_product_attention(
                query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
            )
            return output.transpose(1, 2).contiguous(), None
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal)

    dtype = autocast_dtype(query.device)
    if dtype is not None and query.dtype != torch.float64:
        # As torch's own SDPA has them under autocast, where rotary positions leave query and key wider than value.
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if position_bias is not None:
        # The kernels round it so: the weights must know.
        position_bias = position_bias.to(query.dtype)
    # Autocast would round the weights on their way to the observer, too.
    with without_autocast(query.device):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        bias = _as_bias(attention_mask, position_bias, key.shape[2])
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        causal = causal and attention_mask is None and query.shape[2] > 1
        # The fused kernels' log-sum-exp has no gradient and they know no dropout beside it.
        explicit = explicit or dropout > 0 or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad))
        if causal and bias is not None:
            bias, causal = bias + query.new_full(bias.shape[2:], float("-inf")).triu(1), False
        if explicit:
            output, lse = explicit_attention(query, key, value, bias, causal, scale, softcap, s_aux, dropout)
        else:
            (_, heads, _, size), groups = query.shape, key.shape[1]
            kernel = trusted_kernel(query.device.type, query.dtype, size, heads // groups, bias is not None)
            output, lse = kernel(query, key, value, bias, causal, scale)
        if here.rerouting is not None:
            logits = here.rerouting.logits(query, key, scale, softcap, position_bias)
            output, lse = _with_one_more(output, lse, logits, here.rerouting.taken(value), dropout)
        if here.observer is not None:
            if here.before is not None:
                # What stands before is no part of the layout that an observer asks about.
                new = query.shape[2]
                key, bias = key[:, :, -new:], None if bias is None else bias[..., -new:]
            weights = LayerWeights(layer, query, key, lse, scale, bias, softcap)
            if isinstance(here.masking, Bidirectional):
                weights = replace(weights, backward=weights)
            here.observer.observe(weights)
    return output.transpose(1, 2).contiguous(), None


def _with_one_more(output: Tensor, lse: Tensor, logits: Tensor, value: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """Attention with one more key, from the attention without it.

    A softmax over one more logit is a mixture: weight sigmoid(logit - lse) on the new value, the rest on what there
    was. So no mask has to be made, and ``output`` (B, H, N, d) and ``lse`` (B, H, N) bring windows, soft caps and sinks
    with them. ``logits`` (B, H, N), ``value`` (B, G, 1, d); out, the new output and log-sum-exp.
    """
    weight = torch.sigmoid(logits - lse)[..., None]
    given = weight if dropout == 0 else nn.functional.dropout(weight, dropout)
    value = value.repeat_interleave(output.shape[1] // value.shape[1], dim=1)
    mixed = (1 - weight) * for_summing(output) + given * for_summing(value)
    return mixed.to(output.dtype), torch.logaddexp(lse, logits)


def _as_bias(attention_mask: Tensor | None, position_bias: Tensor | None, length: int) -> Tensor | None:
    """A boolean mask (True: visible) or an additive one, and a position bias, as one term to add to the scores."""
    bias = attention_mask
    if bias is not None:
        bias = bias[..., :length]
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=torch.float32).masked_fill_(~bias, float("-inf"))
    if position_bias is None:
        return bias
    return position_bias if bias is None else bias + position_bias


def register() -> None:
    """Make the attention function known to transformers; masks are made as for its own ``sdpa``.

    torch.compile leaves the function out of its graphs: a graph would replay what it saw when it was traced, and never
    ask again who is watching or what replaces the masks.
    """
    AttentionInterface.register(ATTENTION, torch.compiler.disable(observable_attention))
    AttentionMaskInterface.register(ATTENTION, AttentionMaskInterface()["sdpa"])
