"""A language model without the layers above one of them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .anatomy import CANNOT_RUN, anatomy_of, close, final_norm, keep, once, output_on, states_of, trial
from .attention.function import ATTENTION
from .backbone import depth
from .view import has_a_forward_of_its_own, twin

#: The lists of transformers' configurations that have an entry for each layer. Any other list may happen to be as long:
#: the ids of end tokens, or the directions of a rotary embedding.
_PER_LAYER = frozenset(
    {
        "activation_sparsity_pattern",
        "attention_layers",
        "attention_window",
        "full_attn_idxs",
        "indexer_types",
        "intermediate_size",
        "kv_source_layers",
        "layer_rope_theta",
        "layer_types",
        "layers_block_type",
        "layers_num_experts",
        "mlp_layer_types",
        "moe_layers",
        "moe_topk",
        "no_rope_layers",
        "num_attention_heads",
        "num_attention_heads_per_layer",
        "num_experts",
        "num_key_value_heads",
        "num_key_value_heads_per_layer",
        "rope_scaling_layers",
        "sliding_windows",
        "swiglu_limits",
        "swiglu_limits_shared",
    }
)


def resolve_layer(model: PreTrainedModel, layer: int) -> int:
    """An output layer as a number of layers, counted from 1; negative ones count from the top.

    Raises:
        ValueError: If there is no such layer.
    """
    layers = depth(model)
    if isinstance(layer, bool) or not isinstance(layer, int) or layer == 0 or not -layers <= layer <= layers:
        raise ValueError(
            f"output_layer={layer!r}: {type(model).__name__} has {layers} layers; give the layer after which to stop, "
            f"1 to {layers}, or -{layers} to -1 from the top, or None for all."
        )
    return layer if layer > 0 else layers + 1 + layer


def shortened(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model that stops after its first layers, and ends in the same norm.

    It shares its weights with the one that was given, which stays as it is. Saved, it is a model of so many layers.

    Raises:
        ValueError: If the architecture cannot be shortened, or accelerate has placed the model.
    """
    if layers == depth(model):
        return model
    reason = f"{type(model).__name__} cannot be shortened to {layers} layers"
    if hasattr(model, "_hf_hook"):
        raise ValueError(
            f"{reason}, because accelerate has placed it on its devices. Load it without device_map, or use "
            "output_layer=-1, all layers."
        )
    anatomy = anatomy_of(model)
    final_norm(model)
    if not anatomy.layers:
        raise ValueError(f"{reason}, because its layers were not found. Use output_layer=-1, all layers.")
    if any(map(has_a_forward_of_its_own, model.modules())):
        raise ValueError(
            f"{reason}, because its forward is not its class's own: torch.compile leaves it so. Compile the module's "
            "model after the module is made, or use output_layer=-1, all layers."
        )
    short = twin(model)
    del short.get_submodule(anatomy.layers[0].rpartition(".")[0])[layers:]  # type: ignore[operator]
    if not _shorten(short.config, layers):
        raise ValueError(
            f"{reason}, because its configuration says more about its layers than how many there are. Use "
            "output_layer=-1, all layers, or another model."
        )
    keep(short, anatomy.of_the_first(layers))
    if not once(model, f"stops after layer {layers}", lambda whole: _stops_after(short, layers, whole)):
        raise ValueError(f"{reason}: it then computes something else. Use output_layer=-1, all layers.")
    return short


def _shorten(config: PreTrainedConfig, layers: int) -> bool:
    """Make a configuration that of the first layers; whether it would load again."""
    text = config.get_text_config(decoder=True)
    whole = text.num_hidden_layers
    for name, value in dict(vars(text)).items():
        if name in _PER_LAYER and isinstance(value, list) and len(value) == whole:
            object.__setattr__(text, name, value[:layers])
    text.num_hidden_layers = layers
    try:
        again = type(config).from_dict(config.to_dict())
    except Exception:  # whatever a configuration's own checks raise
        return False
    return bool(again.get_text_config(decoder=True).num_hidden_layers == layers)


def _stops_after(short: PreTrainedModel, layers: int, whole: PreTrainedModel) -> bool:
    """Whether a short model computes what the whole one does in its first layers and its norm."""
    anatomy = anatomy_of(whole)
    tried = trial(whole)
    left: list[Tensor] = []
    layer = tried.get_submodule(anatomy.layers[layers - 1])
    layer.register_forward_hook(lambda module, args, output: left.append(states_of(output)))
    attention = ATTENTION if anatomy.calling else None
    output_on(tried, attention)
    with torch.inference_mode():
        expected = left[0]
        for path in anatomy.norm or ():
            expected = tried.get_submodule(path)(expected)
    try:
        return close(output_on(trial(short), attention).last_hidden_state, expected)
    except CANNOT_RUN:
        return False
