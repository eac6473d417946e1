"""A loaded language model: its size and limits, where and in which precision it runs, and views of it on its weights.

Sums are taken in float32 at least, whatever a model runs in, and in float64 in a float64 model. Three things would take
them elsewhere: a model in half precision, torch's default dtype, and autocast, which rounds the operands of every
matrix product.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from functools import partial
from inspect import signature
from itertools import chain
from types import MethodType, NoneType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

#: The lists of transformers' configurations that have an entry for each layer, beside those that name layers. Any other
#: list may happen to be as long: the ids of end tokens, or the directions of a rotary embedding.
_PER_LAYER = frozenset(
    {
        "activation_sparsity_pattern",
        "attention_window",
        "full_attn_idxs",
        "indexer_types",
        "intermediate_size",
        "moe_topk",
        "num_attention_heads",
        "num_experts",
        "num_key_value_heads",
        "sliding_windows",
        "swiglu_limits",
        "swiglu_limits_shared",
    }
)


def depth(model: PreTrainedModel) -> int:
    """Number of layers."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Number of token ids that have an input embedding."""
    return len(cast(nn.Embedding, model.get_input_embeddings()).weight)


def positions(model: PreTrainedModel) -> int | None:
    """How many positions the model has, or None if its configuration names no limit.

    Beyond the length it was first trained on, a model with long-range rotary embeddings (LongRoPE, as in Phi-3-128k)
    reads every token of a batch otherwise as soon as one text is that long. An embedding would depend on its batch, so
    that length is the limit.
    """
    config = model.config.get_text_config(decoder=True)
    # The second is MPT's name for it.
    found = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") == "longrope":
        found.append(rotary.get("original_max_position_embeddings"))
    return min((limit for limit in found if isinstance(limit, int) and limit > 0), default=None)


def device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its input.

    That is where its first parameter is, unless accelerate has placed the model: what is offloaded is nowhere. Where
    accelerate has placed a model with its head, the hook may be on modules within its body alone.
    """
    within = model.modules() if model.device.type == "meta" else [model]
    placed = (getattr(vars(module).get("_hf_hook"), "execution_device", None) for module in within)
    found = next((device for device in placed if device is not None), None)
    return model.device if found is None else torch.device(found)


def is_checkpointing(model: PreTrainedModel) -> bool:
    """Whether a backward pass through the model would run its layers a second time."""
    return model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def check_it_can_be_saved(model: PreTrainedModel) -> None:
    """Refuse weights that transformers would not know how to write.

    Raises:
        ValueError: For a model that torchao's ``quantize_`` changed after it was loaded. One that transformers
            quantised on loading has a quantizer, which knows.
    """
    quantized = any(type(parameter.data).__module__.startswith("torchao") for parameter in model.parameters())
    if quantized and getattr(model, "hf_quantizer", None) is None:
        raise ValueError(
            f"{type(model).__name__} was quantised after it was loaded, and its configuration does not say how, so it "
            "cannot be saved. Quantise it on loading instead: "
            'model_kwargs={"quantization_config": TorchAoConfig(...)}, with TorchAoConfig from transformers.'
        )


def keeping(model: PreTrainedModel, kept: Cache | None) -> dict[str, Any]:
    """The arguments by which a model reads behind keys and values, and adds its own to them; None: it keeps none."""
    # transformers calls it "cache" from 5.24 on; a model of somebody else's may have the former name.
    name = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    return {name: kept, "use_cache": kept is not None}


def for_summing(values: Tensor) -> Tensor:
    """The same values, to be added up."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What ``torch.autocast`` runs products in here, on this device; None outside it."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """In this block, operations on this device run in the dtype that they are given."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def weighted_sum(weights: Tensor, states: Tensor) -> Tensor:
    """sum_j weights_ij states_j: of (B, n, N), as wide as sums are, and (B, N, D), (B, n, D), as wide."""
    with without_autocast(states.device):
        return torch.bmm(weights, for_summing(states))


def view(model: PreTrainedModel) -> PreTrainedModel:
    """A model that shares the weights of the one that was given, and has modules and a configuration of its own.

    How a model attends stands in its configuration, and what listens stands in its modules: what is set on the view
    changes nothing for others who use the same weights. What moves or casts the weights of one moves those of both. An
    adapter that is added to one is not seen by the other.

    Returns:
        The model itself where a forward is not its class's own (as ``torch.compile`` leaves it): a copy would run what
        it is a copy of.
    """
    return model if any(map(has_a_forward_of_its_own, model.modules())) else twin(model)


def has_a_forward_of_its_own(module: nn.Module) -> bool:
    """Whether a module's forward is neither its class's own nor what accelerate puts around it."""
    return not isinstance(vars(module).get("forward"), (NoneType, MethodType, partial))


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A deep copy but for the weights: parameters, buffers, and what quantisation or accelerate keeps of them."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    # What one finds out later, both know: see st_reba.lm.anatomy.
    shared: list[Any] = [getattr(model, "st_reba_anatomies", None)]
    for module in model.modules():
        # With the dicts that hold them, what is moved or cast in one is in both.
        shared += [module._parameters, module._buffers]
        # Hooks that were put there are called in both; what they belong to may be nothing to copy.
        memo |= {id(hooks): hooks.copy() for name, hooks in vars(module).items() if name.endswith(_HOOKS)}
        hook = getattr(module, "_hf_hook", None)
        shared += [getattr(each, "weights_map", None) for each in (hook, *getattr(hook, "hooks", ()))]
        if next(module.children(), None) is None:
            # Some quantised modules move what they need from the weight to an object beside it when they first run.
            shared += [value for value in vars(module).values() if not isinstance(value, _COPIED)]
    return copy.deepcopy(model, memo | {id(value): value for value in shared})


#: How the names of an ``nn.Module``'s dicts of hooks end.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")

#: What stands in a module and is not shared: what reads the configuration, and what belongs to this module alone.
_COPIED = (dict, PreTrainedConfig, MethodType, partial)


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


def first_layers(model: PreTrainedModel, paths: Sequence[str], count: int) -> PreTrainedModel | None:
    """A view of a model that ends after the first of its layers.

    Args:
        model: The model.
        paths: Paths of its layers, in the order in which they run.
        count: How many of them are left.

    Returns:
        None where a configuration of so many layers would not load again.
    """
    short = twin(model)
    # The list that has them.
    del short.get_submodule(paths[0].rpartition(".")[0])[count:]  # type: ignore[operator]
    text = short.config.get_text_config(decoder=True)
    for name, value in dict(vars(text)).items():
        if ("layer" in name or name in _PER_LAYER) and isinstance(value, list) and len(value) == len(paths):
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    try:
        again = type(short.config).from_dict(short.config.to_dict())
    except Exception:  # whatever a configuration's own checks raise
        return None
    return short if again.get_text_config(decoder=True).num_hidden_layers == count else None
