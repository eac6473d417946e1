"""A language model with modules and a configuration of its own on the weights of another."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain
from types import MethodType, NoneType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


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
    shared: list[Any] = [getattr(model, "st_reba_anatomy", None)]
    for module in model.modules():
        # With the dicts that hold them, what is moved or cast in one is in both.
        shared += [module._parameters, module._buffers]
        # Hooks that were put there are called in both; what they belong to may be nothing to copy.
        shared += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        hook = getattr(module, "_hf_hook", None)
        shared += [getattr(each, "weights_map", None) for each in (hook, *getattr(hook, "hooks", ()))]
        if next(module.children(), None) is None:
            # Some quantised modules move what they need from the weight to an object beside it when they first run.
            shared += [value for value in vars(module).values() if not isinstance(value, _COPIED)]
    return copy.deepcopy(model, memo | {id(value): value for value in shared})


#: What stands in a module and is not shared: what reads the configuration, and what belongs to this module alone.
_COPIED = (dict, PreTrainedConfig, MethodType, partial)
