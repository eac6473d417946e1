"""A language model that the program has loaded: a view of its body, which leaves the model as it is."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from .views import has_own_forward, shallow_copy

# Attribute of a function that ``torch.compile`` returned: the function that it was given.
_COMPILED_FROM = "_torchdynamo_orig_callable"


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside what ``torch.compile`` or peft put around it.

    Raises:
        ValueError: If there is none, or the adapter is a learned prompt, which needs peft's own forward.
    """
    inner: Any = getattr(model, "_orig_mod", model)
    if hasattr(inner, "get_base_model"):
        if any(config.is_prompt_learning for config in inner.peft_config.values()):
            raise ValueError(
                f"The adapter of this {type(inner).__name__} is a learned prompt, which no recipe of st_reba can read. "
                "Give the model without it (get_base_model()), or one with LoRA or another adapter of its layers."
            )
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(
            f"A {type(model).__name__} was given: give a path, a Hub id, a language model of transformers such as "
            "AutoModelForCausalLM gives, or a Transformer of sentence-transformers."
        )
    return inner


def body_of(model: nn.Module, *, disable_adapter: bool = False) -> PreTrainedModel:
    """Return a view of a loaded model's body, which may generate meanwhile.

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
    body: Any = unwrapped(model).base_model
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
        _remove_adapters(view)
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


def _remove_adapters(view: PreTrainedModel) -> None:
    """Put the layers back that adapters wrap.

    Raises:
        ValueError: If there are none, or they are merged into the layers' weights.
    """
    adapted = {path: module for path, module in view.named_modules() if hasattr(module, "get_base_layer")}
    if not adapted:
        raise ValueError("disable_adapter=True: this model has no adapter. Leave it out.")
    for path, module in adapted.items():
        layer: Any = module
        if getattr(layer, "merged", False):
            raise ValueError(
                f"disable_adapter=True: the adapter is merged into the weights of {path}. Call unmerge_adapter() on "
                "the model, or leave disable_adapter out."
            )
        parent, _, name = path.rpartition(".")
        setattr(view.get_submodule(parent), name, layer.get_base_layer())
    for name in ("peft_config", "_hf_peft_config_loaded"):
        vars(view).pop(name, None)
