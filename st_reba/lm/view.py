"""A language model with modules and a configuration of its own on the weights of another."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain
from types import MethodType, NoneType
from typing import Any

from torch import nn
from transformers import PreTrainedModel


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
    """A deep copy but for the weights: parameters, buffers, and what accelerate has offloaded of them."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    # What one finds out later, both know: see st_reba.lm.anatomy.
    anatomy = getattr(model, "st_reba_anatomy", None)
    memo[id(anatomy)] = anatomy
    for module in model.modules():
        # With the dicts that hold them, what is moved or cast in one is in both.
        shared: list[Any] = [module._parameters, module._buffers]
        hook = getattr(module, "_hf_hook", None)
        shared += [getattr(each, "weights_map", None) for each in (hook, *getattr(hook, "hooks", ()))]
        memo |= {id(weights): weights for weights in shared if weights is not None}
    return copy.deepcopy(model, memo)
