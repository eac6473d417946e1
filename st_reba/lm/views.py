"""Views of a loaded model: other modules and configuration on the same weights, and the model stays as it is."""

from __future__ import annotations

import contextlib
import copy
import logging
from functools import partial
from itertools import chain
from types import MethodType, NoneType
from typing import Any, cast

import torch
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

# Ends of the names of a module's dictionaries of hooks.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
# Attributes of a module that a view has of its own: they read the configuration, or belong to the module.
_COPIED = (dict, PreTrainedConfig, MethodType, partial)
# Attribute of a function that ``torch.compile`` returned: the function that it was given.
_COMPILED_FROM = "_torchdynamo_orig_callable"
# Attributes of a model with adapters.
_ADAPTERS = ("peft_config", "_hf_peft_config_loaded")

#: Configuration entries that list one value for each layer, besides those that have "layer" in their names. Any other
#: list may happen to be as long, such as the ids of end tokens.
PER_LAYER = (
    "activation_sparsity_pattern", "attention_window", "full_attn_idxs", "indexer_types", "intermediate_size",
    "moe_topk", "num_attention_heads", "num_experts", "num_key_value_heads", "sliding_windows", "swiglu_limits",
    "swiglu_limits_shared",
)  # fmt: skip


def depth(model: PreTrainedModel) -> int:
    """Return the number of layers.

    Raises:
        ValueError: If the configuration does not name it.
    """
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    if count is None:
        problem = f"The configuration of {type(model).__name__} has no num_hidden_layers, so it is no stack of layers."
        raise ValueError(f"{problem} Use a decoder-only language model, such as Llama, Qwen, GPT-2 or Mistral.")
    return int(count)


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
        shared += [getattr(part, "weights_map", None) for part in (hook, *getattr(hook, "hooks", ()))]
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


# Models that the program has loaded


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside what ``torch.compile`` or peft put around it.

    Raises:
        ValueError: If there is none, or the adapter is a learned prompt, which needs peft's own forward.
    """
    inner: Any = getattr(model, "_orig_mod", model)
    if hasattr(inner, "get_base_model"):
        if any(config.is_prompt_learning for config in inner.peft_config.values()):
            raise learned_prompt(f"The adapter of this {type(inner).__name__}")
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(
            f"A {type(model).__name__} was given: give a path, a Hub id, a language model of transformers such as "
            "AutoModelForCausalLM gives, or a Transformer of sentence-transformers."
        )
    return inner


def learned_prompt(adapter: str) -> ValueError:
    """Return the error for an adapter that is a learned prompt."""
    advice = "Give the model without it, or with an adapter of its layers, such as LoRA."
    return ValueError(f"{adapter} is a learned prompt, which no recipe of st_reba can read. {advice}")


def is_multimodal(config: PreTrainedConfig) -> bool:
    """Return whether a configuration is of more than a language model, whose own configuration is a part of it."""
    return not config.is_encoder_decoder and config.get_text_config(decoder=True) is not config


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that gives the last hidden states of a text, without a head and without other parts.

    That is its body, unless that has parts for images or sounds, has the head itself, or only wraps a decoder. Of a
    multimodal model, the part must be one that transformers loads by its own configuration.
    """
    body: Any = getattr(model.base_model, "_orig_mod", model.base_model)
    kind = type(body.config.get_text_config(decoder=True))
    for part in [] if body.config.is_encoder_decoder else body.modules():
        is_text = isinstance(part, PreTrainedModel) and type(part.config) is kind
        if is_text and part.get_output_embeddings() is None and _embeddings(part) is not None:
            return cast(PreTrainedModel, part if not is_multimodal(body.config) or _loads_alone(part) else body)
    return cast(PreTrainedModel, body)


def _loads_alone(part: PreTrainedModel) -> bool:
    """Return whether transformers makes the same of a part's configuration."""
    with contextlib.suppress(ValueError):
        made: Any = MODEL_MAPPING.get(type(part.config), None)
        return made is type(part)
    # It names a class that is not there.
    return False


def take_over(part: Any, whole: PreTrainedModel, path: str) -> None:
    """Give a part of a model what is known of the whole: its name, adapters, devices, and how it was quantised."""
    config = part.config
    config._name_or_path = whole.config._name_or_path
    config.tie_word_embeddings = any(getattr(each, "tie_word_embeddings", False) for each in (config, whole.config))
    if (quantization := getattr(whole.config, "quantization_config", None)) is not None:
        config.quantization_config = quantization
    for name in (*_ADAPTERS, "hf_quantizer", "name_or_path"):
        if name in vars(whole):
            setattr(part, name, vars(whole)[name])
    if devices := getattr(whole, "hf_device_map", None):
        # Modules above it, or else within it.
        above = [device for name, device in devices.items() if not name or f"{path}.".startswith(f"{name}.")]
        within = {name.removeprefix(f"{path}."): at for name, at in devices.items() if name.startswith(f"{path}.")}
        part.hf_device_map = {"": above[0]} if above else within
    if is_borrowed(whole):
        part._apply = partial(_stay, part)


def _embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return a model's input embeddings; None if it names none."""
    with contextlib.suppress(NotImplementedError, AttributeError):
        return model.get_input_embeddings()
    return None


def body_of(model: nn.Module, *, disable_adapter: bool = False) -> PreTrainedModel:
    """Return a view of a loaded model's decoder, or of all of a multimodal model, which may generate meanwhile.

    The view is in evaluation mode, whether the model trains or not, and has the adapters that are active now. Its hooks
    are called in both. Only its owner moves and casts it.

    Args:
        model: With its head or without; compiled, quantised, dispatched by accelerate, or with adapters of peft.
        disable_adapter: Whether the view is without the adapters.

    Raises:
        ValueError: If it is no model of transformers, its body has a forward of somebody's own, or there is no adapter
            that can be left out.
    """
    adapters = getattr(getattr(model, "_orig_mod", model), "peft_config", None)
    body: Any = unwrapped(model)
    # The part of a multimodal model is taken when it is proven.
    body = body.base_model if is_multimodal(body.config) else decoder_of(body)
    body = getattr(body, "_orig_mod", body)
    for path, module in body.named_modules():
        if has_own_forward(module) and not hasattr(vars(module)["forward"], _COMPILED_FROM):
            raise ValueError(
                f"{path or type(body).__name__} of this model has a forward that is not its class's own, so a view of "
                "it would not run alone. Give the model as transformers loads it."
            )
    view = shallow_copy(body).eval()
    for module in view.modules():
        # A compiled forward belongs to the model that it was compiled from.
        if hasattr(vars(module).get("forward"), _COMPILED_FROM):
            del module.forward
        # Rotary frequencies that follow the length of a text differ from call to call.
        if getattr(module, "rope_type", "default") != "default":
            module._buffers = dict(module._buffers)
    if disable_adapter:
        if not unwrap_children(view):
            raise ValueError("disable_adapter=True: this model has no adapter. Leave it out.")
        forget_adapters(view)
    elif adapters is not None:
        # transformers then saves the adapters, and prefixes are not kept.
        view.peft_config, view._hf_peft_config_loaded = adapters, True
    # A bound method could not be pickled.
    view._apply = partial(_stay, view)
    return cast(PreTrainedModel, view)


def is_borrowed(model: nn.Module) -> bool:
    """Return whether a model is a view of a model that somebody else has loaded, moves and casts."""
    return getattr(vars(model).get("_apply"), "func", None) is _stay


def _stay(view: PreTrainedModel, *args: Any, **kwargs: Any) -> PreTrainedModel:
    """Take the place of :meth:`torch.nn.Module._apply`, which moves and casts."""
    return view


def forget_adapters(model: PreTrainedModel) -> None:
    """Remove what says that a model has adapters."""
    for name in _ADAPTERS:
        vars(model).pop(name, None)


def unwrap_children(parent: nn.Module, path: str = "") -> bool:
    """Put back what adapters wrap within a module, and return whether they wrap anything.

    Raises:
        ValueError: If they are merged into the weights of their layers.
    """
    is_any = False
    for name, child in list(parent.named_children()):
        place, module = f"{path}.{name}".strip("."), child
        while hasattr(module, "original_module") or hasattr(module, "get_base_layer"):
            if getattr(module, "merged", False):
                problem = f"disable_adapter=True: the adapter is merged into the weights of {place}."
                raise ValueError(f"{problem} Call unmerge_adapter() on the model, or leave disable_adapter out.")
            # The first is of a module that is trained as a whole.
            wrapper: Any = module
            module = wrapper.original_module if hasattr(wrapper, "original_module") else wrapper.get_base_layer()
        if module is not child:
            setattr(parent, name, module)
            is_any = True
        is_any |= unwrap_children(module, place)
    return is_any
