"""Setting a backbone up for what a method does with its attention, or refusing it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from transformers import PreTrainedModel

from ..anatomy import anatomy_of, reuses_cache, set_attention
from ..backbone import depth
from .function import ATTENTION


def prepare(model: PreTrainedModel) -> None:
    """Refuse a backbone whose first token sees the second, and make sure that its attention is its own.

    Asked for a soft cap (Gemma 2), transformers' ``sdpa`` drops it silently in some versions; there our attention
    function, which honours it, takes the place of ``sdpa``.

    Raises:
        ValueError: For encoders, encoder-decoders, and decoders whose configuration turned the causal mask off.
    """
    name = type(model).__name__
    advice = "st_reba needs a decoder-only (causal) language model, such as Llama, Qwen, GPT-2 or Mistral."
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder. {advice}")
    anatomy = anatomy_of(model)
    if not anatomy.is_causal:
        raise ValueError(f"In {name} the first token's state changes with the second token: it is an encoder. {advice}")
    if model.config._attn_implementation == "sdpa" and anatomy.needs_explicit_softmax:
        set_attention(model, ATTENTION)


def watch_attention(model: PreTrainedModel) -> tuple[int, ...]:
    """Set a model up for the attention of all its layers to be watched.

    Returns:
        Indices of the layers that have attention.

    Raises:
        ValueError: If there are none (a state-space model), or their attention cannot be watched.
    """
    name, layers = type(model).__name__, anatomy_of(model).attention_layers
    if not layers:
        raise ValueError(
            f"{name} has no attention to look back with, so ReBA cannot run on it. Use a model with attention layers, "
            "or EchoModule."
        )
    require_interface(model, layers, f"The attention of {name} cannot be watched", "Use EchoModule")
    return layers


def require_interface(model: PreTrainedModel, layers: Collection[int], refusal: str, advice: str) -> None:
    """Set a model up for the attention of these layers to be changed or watched, and make sure that it can be.

    Args:
        model: The model.
        layers: Indices of the layers.
        refusal: What cannot be done where they do not call our function, as a sentence begins.
        advice: What to do then, beside taking another architecture.

    Raises:
        ValueError: If one of them does not call our function.
    """
    anatomy = anatomy_of(model)
    if not anatomy.calls_our_attention or not set(layers) <= set(anatomy.attention_layers):
        raise ValueError(
            f"{refusal}, because the attention there does not call transformers' attention interface. {advice}, or an "
            "architecture that does, such as Llama, Qwen, Mistral, Gemma or GPT-2."
        )
    set_attention(model, ATTENTION)


def make_cacheable(model: PreTrainedModel) -> bool:
    """Set a model up for its masks to be replaced behind a cache; False, and the model as it was, where that fails."""
    is_cacheable = reuses_cache(model)
    if is_cacheable:
        set_attention(model, ATTENTION)
    return is_cacheable


def reads_behind_prefixes(model: PreTrainedModel) -> bool:
    """Whether what stands before texts can be run once for all of them; the model is then set up for it.

    Attention that somebody has chosen for its speed, such as flash attention, stays.
    """
    name = model.config._attn_implementation
    if name == ATTENTION:
        return reuses_cache(model)
    return name in ("eager", "sdpa") and make_cacheable(model)


def resolve_layers(
    layers: Literal["all"] | Sequence[int], model: PreTrainedModel, attending: Collection[int]
) -> frozenset[int]:
    """The indices that are meant, of the layers that have attention; negative ones count from the top.

    Raises:
        ValueError: If there is no such layer, or it has no attention.
    """
    if layers == "all":
        return frozenset(attending)
    count = depth(model)
    for layer in layers:
        if not -count <= layer < count:
            raise ValueError(
                f"layers={layers}: the model has {count} layers, so {layer} is out of range; "
                f"use {-count} to {count - 1}."
            )
    chosen = frozenset(layer % count for layer in layers)
    if missing := sorted(chosen - set(attending)):
        raise ValueError(
            f"layers={layers}: layers {missing} of {type(model).__name__} have no attention; "
            f"those with attention are {sorted(attending)}."
        )
    return chosen


def watched_last_layer(model: PreTrainedModel, instead: str) -> int:
    """The last layer's index, where its attention can be watched.

    Args:
        model: The model, which is set up for it.
        instead: What to use where it cannot be watched.

    Raises:
        ValueError: If it cannot be watched.
    """
    last = depth(model) - 1
    refusal = f"The attention of {type(model).__name__}'s last layer cannot be watched"
    require_interface(model, [last], refusal, f"Use {instead}")
    return last
