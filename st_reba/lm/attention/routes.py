"""How the attention of a backbone is watched and changed, and setting it up for that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from ..anatomy import anatomy_of, reuses_cache, set_attention
from ..backbone import depth
from .function import ATTENTION

#: Memory that the maps of one micro-batch may take where an architecture must hand them all out, in bytes.
MAP_BUDGET = 2**28


@dataclass(frozen=True)
class AttentionRoute:
    """How the attention of a backbone is watched.

    Attributes:
        layers: Indices of the layers that have attention.
        through_function: Whether they call our attention function; else the architecture hands out its maps.
    """

    layers: tuple[int, ...]
    through_function: bool


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


def attention_route(model: PreTrainedModel) -> AttentionRoute:
    """Find out how this model's attention can be watched, and set it up for that.

    Raises:
        ValueError: If it has no attention at all (a state-space model).
    """
    anatomy = anatomy_of(model)
    if anatomy.calls_our_attention:
        set_attention(model, ATTENTION)
        return AttentionRoute(anatomy.attention_layers, through_function=True)
    if not anatomy.attention_layers:
        raise ValueError(
            f"{type(model).__name__} has no attention to look back with, so ReBA cannot run on it. "
            "Use a model with attention layers, or EchoModule."
        )
    if not anatomy.maps_are_sound:
        raise ValueError(
            f"{type(model).__name__} computes other hidden states when it hands out its attention maps than when it "
            "does not (Falcon with ALiBi does so in some versions of transformers), so the maps cannot be trusted and "
            "ReBA cannot run on it. Use EchoModule, or another version of transformers."
        )
    set_attention(model, "eager")
    return AttentionRoute(anatomy.attention_layers, through_function=False)


def make_cacheable(model: PreTrainedModel) -> bool:
    """Set a model up for its masks to be replaced behind a cache; False, and the model as it was, where that fails."""
    if not reuses_cache(model):
        return False
    set_attention(model, ATTENTION)
    return True


def make_bidirectional(model: PreTrainedModel, count: int) -> frozenset[int]:
    """Set a model up for its last ``count`` layers to attend both ways, and make sure that they can.

    Returns:
        The indices of those layers.

    Raises:
        ValueError: If the model has fewer layers, or one of them has no attention that can be turned.
    """
    if count == 0:
        return frozenset()
    name = type(model).__name__
    if count > depth(model):
        raise ValueError(f"bidirectional_layers={count}: {name} has {depth(model)} layers; use 0 to {depth(model)}.")
    layers = frozenset(range(depth(model) - count, depth(model)))
    if not _can_be_changed(model, layers):
        raise ValueError(
            f"bidirectional_layers={count}: the last layers of {name} cannot be made to attend both ways, because they "
            "do not call transformers' attention interface. Use bidirectional_layers=0, or an architecture that does, "
            "such as Llama, Qwen, Mistral, Gemma or GPT-2."
        )
    set_attention(model, ATTENTION)
    return layers


def make_rerouted(model: PreTrainedModel, layers: Collection[int]) -> None:
    """Set a model up for a token's key and value to be re-routed in these layers, and make sure that they can.

    Raises:
        ValueError: If the attention of one of them cannot be reached.
    """
    if not _can_be_changed(model, layers):
        raise ValueError(
            f"The keys and values of layers {sorted(layers)} of {type(model).__name__} cannot be re-routed, because "
            "these layers do not call transformers' attention interface. Use CausalTransformer with the same template, "
            "or an architecture that does, such as Llama, Qwen, Mistral, Gemma or GPT-2."
        )
    set_attention(model, ATTENTION)


def _can_be_changed(model: PreTrainedModel, layers: Collection[int]) -> bool:
    """Whether these layers call our attention function, so that they see what it masks and re-routes."""
    anatomy = anatomy_of(model)
    return anatomy.calls_our_attention and set(layers) <= set(anatomy.attention_layers)


def micro_batch(model: PreTrainedModel, length: int) -> int:
    """How many texts of ``length`` tokens have attention maps within :data:`MAP_BUDGET`, all together; at least 1."""
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    return max(1, MAP_BUDGET // (depth(model) * heads * length**2 * model.dtype.itemsize))


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


def watched_last_layer(model: PreTrainedModel, instead: str) -> tuple[AttentionRoute, int]:
    """How the attention of a model's last layer is watched, and which layer that is.

    Args:
        model: The model, which is set up for it.
        instead: What to use where it cannot be watched.

    Raises:
        ValueError: If it cannot be watched.
    """
    route, last = attention_route(model), depth(model) - 1
    if not route.through_function or last not in route.layers:
        raise ValueError(
            f"The attention of {type(model).__name__}'s last layer cannot be watched, because it does not call "
            f"transformers' attention interface. Use {instead}, or an architecture that does, such as Llama, Qwen or "
            "GPT-2."
        )
    return route, last
