"""Adapters of peft: loaded onto a model, merged into it, and checked before they are saved."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from ..lm.loaded import is_borrowed
from ..lm.sizes import in_a_line
from ..optional import require

#: Names of the parts in which peft keeps what it wraps.
_WRAPPED = (".base_layer.", ".original_module.", ".token_adapter.")

_ATTRIBUTES = ("peft_config", "_hf_peft_config_loaded")


def unadapted(name: str) -> str:
    """Return the name of a weight in the model without its adapter."""
    for part in _WRAPPED:
        name = name.replace(part, ".")
    return name


def active(model: Any) -> list[str]:
    """Return the names of the adapters that a model has and uses.

    Raises:
        ValueError: If its adapters are disabled.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if any(layer.disable_adapters for layer in layers):
        raise ValueError(
            "The adapter is disabled, and would be active when the model is loaded again. Call enable_adapters(), or "
            "delete_adapter() to leave it out."
        )
    return list(dict.fromkeys(name for layer in layers for name in layer.active_adapters))


def merge(model: Any) -> None:
    """Merge the active adapter into the weights of a model as peft does, and remove all adapters.

    Args:
        model: Model that :mod:`transformers` or peft gave an adapter.

    Raises:
        ValueError: If there is none, peft cannot merge it, or the weights belong to a model that the program has
            loaded. The model is then as it was.
        ImportError: If peft is not installed.
    """
    peft = require("peft", "train", "An adapter")
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not getattr(model, "peft_config", None):
        raise ValueError(f"{type(model).__name__} has no adapter to merge.")
    if is_borrowed(model):
        raise ValueError(
            "The adapter belongs to a model that the program has loaded, whose weights would change. Merge it there, "
            "with merge_and_unload(), and give that model."
        )
    names, layers = active(model), [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    kinds = sorted({model.peft_config[name].peft_type for name in names})
    kind = " and ".join(str(getattr(kind, "value", kind)) for kind in kinds)
    # Several parts may wrap one another.
    adapted = {id(base): base for base in (layer.get_base_layer() for layer in layers)}.values()
    weights = [id(weight) for base in adapted for weight in base.parameters(recurse=False)]
    done = list[Any]()
    try:
        if len(kinds) != 1 or len({*weights}) < len(weights):
            raise ValueError("several kinds of adapters are active" if len(kinds) > 1 else "layers share weights")
        for layer in layers:
            done.append(layer)
            layer.merge(safe_merge=True)
        _tuner(peft.PEFT_TYPE_TO_TUNER_MAPPING[kinds[0]], model, names).unload()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        for layer in reversed(done):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                layer.unmerge()
        raise ValueError(
            f"peft cannot merge this adapter of kind {kind} ({in_a_line(error)}). Save it as an adapter."
        ) from error
    for name in _ATTRIBUTES:
        vars(model).pop(name, None)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


def _tuner(kind: Any, model: Any, names: list[str]) -> Any:
    """Return peft's tuner of a model that has an adapter already; made as usual, it would add another."""
    tuner = kind.__new__(kind)
    nn.Module.__init__(tuner)
    tuner.model, tuner.peft_config, tuner.active_adapter = model, model.peft_config, names
    return tuner
