"""Views of a loaded model: other modules and configuration on the same weights."""

from __future__ import annotations

import copy
import logging
from functools import partial
from itertools import chain
from types import MethodType, NoneType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

# Ends of the names of a module's dictionaries of hooks.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
# Attributes of a module that a view has of its own: they read the configuration, or belong to the module.
_COPIED = (dict, PreTrainedConfig, MethodType, partial)

#: Configuration entries that list one value for each layer, besides those that have "layer" in their names. Any other
#: list may happen to be as long, such as the ids of end tokens.
PER_LAYER = (
    "activation_sparsity_pattern", "attention_window", "full_attn_idxs", "indexer_types", "intermediate_size",
    "moe_topk", "num_attention_heads", "num_experts", "num_key_value_heads", "sliding_windows", "swiglu_limits",
    "swiglu_limits_shared",
)  # fmt: skip


def depth(model: PreTrainedModel) -> int:
    """Return the number of layers."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's input.

    accelerate's hooks name it where weights are offloaded. They may be on modules within the model alone.
    """
    modules = model.modules() if model.device.type == "meta" else [model]
    devices = (getattr(vars(module).get("_hf_hook"), "execution_device", None) for module in modules)
    chosen = next((device for device in devices if device is not None), None)
    return model.device if chosen is None else torch.device(chosen)


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is neither its class's nor accelerate's, such as a compiled one."""
    return not isinstance(vars(module).get("forward"), (NoneType, MethodType, partial))


def shallow_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules and configuration, and share its weights.

    What moves or casts the weights of one moves those of both. An adapter that is added to one is not in the other.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    # Facts that one finds later are known to both: see st_reba.lm.parts.
    shared: list[Any] = [getattr(model, "st_reba_parts", None)]
    for module in model.modules():
        # With their dictionaries, what is moved or cast in one is in both.
        shared += [module._parameters, module._buffers]
        # Hooks are called in both. What they belong to may not be copyable.
        memo |= {id(hooks): hooks.copy() for name, hooks in vars(module).items() if name.endswith(_HOOKS)}
        hook = getattr(module, "_hf_hook", None)
        shared += [getattr(own, "weights_map", None) for own in (hook, *getattr(hook, "hooks", ()))]
        if next(module.children(), None) is None:
            # Some quantised modules move weights to an object of their own when they first run.
            shared += [value for value in vars(module).values() if not isinstance(value, _COPIED)]
    return copy.deepcopy(model, memo | {id(value): value for value in shared})


def trial_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a view to try things on and throw away, in evaluation mode. It runs the forwards of the classes."""
    trial = shallow_copy(getattr(model, "_orig_mod", model)).eval()
    trial.config.get_text_config(decoder=True).use_cache = False
    for module in trial.modules():
        if has_own_forward(module):
            del module.forward
    return trial


def first_layers(model: PreTrainedModel, paths: tuple[str, ...], count: int) -> PreTrainedModel | None:
    """Return a view without the layers above ``count``, or None if its configuration would not load again.

    Args:
        model: The model.
        paths: Paths of its layers.
        count: Number of layers that stay.
    """
    short = shallow_copy(model)
    del short.get_submodule(paths[0].rpartition(".")[0])[count:]  # type: ignore[operator]
    config = short.config.get_text_config(decoder=True)
    for name, value in dict(vars(config)).items():
        if ("layer" in name or name in PER_LAYER) and isinstance(value, list) and len(value) == len(paths):
            setattr(config, name, value[:count])
    config.num_hidden_layers = count
    try:
        again = type(short.config).from_dict(short.config.to_dict())
    except Exception:  # whatever a configuration's own checks raise
        return None
    return short if again.get_text_config(decoder=True).num_hidden_layers == count else None


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation, without the log line about architectures that ignore it."""
    # A filter, not a level: to set a level makes every logger forget what it has cached.
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_error)
    try:
        model.set_attn_implementation(name)
    finally:
        logger.removeFilter(_is_error)
    if name == "eager":
        # Falcon reads this attribute, and the method does not set it.
        model.config._attn_implementation = name


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
