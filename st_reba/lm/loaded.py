"""A language model that a program has already loaded: a view of its body, which leaves the model as it is."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from .backbone import has_a_forward_of_its_own, twin

#: What ``torch.compile`` notes on the function that it returns: the function that it was given.
_COMPILED_FROM = "_torchdynamo_orig_callable"


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model of transformers inside what ``torch.compile`` or peft put around it.

    Raises:
        ValueError: If there is none, or the adapter is a prompt, which only peft's own forward puts before a text.
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
    """A view of a loaded model's body: its weights, and modules and a configuration of the view's own.

    Nothing of the loaded model is changed, by this or by what runs the view, so that it can generate meanwhile. Its
    hooks are called in both. The view evaluates, whether the model trains or not, and has the adapters that are active
    now.

    Args:
        model: With its head or without; compiled, quantised, dispatched by accelerate, or with adapters of peft.
        disable_adapter: Whether the view is without the adapters.

    Raises:
        ValueError: If it is no model of transformers, its body runs code that somebody has put there, or there is no
            adapter that can be left out.
    """
    whole = unwrapped(model)
    adapters = getattr(getattr(model, "_orig_mod", model), "peft_config", None)
    body: Any = whole.base_model
    body = getattr(body, "_orig_mod", body)
    for path, module in body.named_modules():
        if has_a_forward_of_its_own(module) and not hasattr(vars(module)["forward"], _COMPILED_FROM):
            raise ValueError(
                f"{path or type(body).__name__} of this model has a forward that is not its class's own, so a view of "
                "it would not run alone. Give the model as transformers loads it."
            )
    view = twin(body).eval()
    for module in view.modules():
        # Uncompiled: what is compiled belongs to the model that it was compiled from.
        if hasattr(vars(module).get("forward"), _COMPILED_FROM):
            del module.forward
        # Rotary frequencies that follow the length of a text are another's at each call.
        if getattr(module, "rope_type", "default") != "default":
            module._buffers = dict(module._buffers)
    if disable_adapter:
        _without_adapters(view)
    elif adapters is not None:
        # So transformers saves the adapters, and nobody keeps what they may change.
        view.peft_config, view._hf_peft_config_loaded = adapters, True
    return cast(PreTrainedModel, view)


def _without_adapters(view: PreTrainedModel) -> None:
    """Put the layers back that adapters stand around.

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
