"""What a model is made of: enough to tell whether it is what it was."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

# What a configuration says of a run and not of the model.
_OF_A_RUN = frozenset({"use_cache", "output_hidden_states", "output_attentions", "return_dict", "tie_word_embeddings"})


class Build:
    """Kinds and places of a model's modules, its weights, and its configuration, as they are now.

    Two views of one backbone are of one build. It is another one after a module or a weight was replaced or changed in
    place, or was moved. Nothing is kept alive by it. What is written past PyTorch's count of changes, through
    ``weight.data``, into the memory that a weight has, is not noticed.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        parts = list(_identified(model))
        self._description = _described(model, parts)
        # An object that takes the place of one that is gone may have its number.
        self._parts = [weakref.ref(part) for _, part, *_ in parts]

    def is_that_of(self, model: nn.Module) -> bool:
        """Whether a model is of this build."""
        return all(part() is not None for part in self._parts) and self._description == _described(
            model, _identified(model)
        )


def _described(model: nn.Module, parts: Iterable[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], object]:
    return [(name, *told) for name, part, *told in parts], _settings(getattr(model, "config", None))


def _identified(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Of each part: its name, an object that lives as long as it does, and what else tells it from others.

    A view has copies of the modules that read the configuration, so their kinds and forwards are what counts.
    """
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, (MethodType, partial)):
            forward = forward.__func__ if isinstance(forward, MethodType) else forward.func
        yield name, type(module) if forward is None else forward, type(module), id(forward)
        for key, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            # Quantised weights, of a class of their own, are swapped in their places when a model is moved, which
            # PyTorch refuses where something refers to them weakly.
            lives = weight if type(weight.data) is Tensor else type(weight)
            yield (name, key), lives, id(weight), *_state(weight)


def _state(weight: Tensor) -> tuple[object, ...]:
    """What changes when a weight is written to, moved or cast."""
    place = weight.dtype, weight.device
    try:
        return *place, weight._version, weight.data_ptr()
    except RuntimeError:
        # Made in inference mode, or, as some quantised ones, without memory of its own.
        return place


def _settings(value: object) -> object:
    """A configuration, or what stands in one, in containers of its own: a deep copy takes several times as long."""
    if isinstance(value, PreTrainedConfig) and vars(value).get("_heterogeneity_spec") is None:
        return type(value), _settings({name: inner for name, inner in vars(value).items() if name[0] != "_"})
    if isinstance(value, dict):
        return {name: _settings(inner) for name, inner in value.items() if name not in _OF_A_RUN}
    if isinstance(value, (list, tuple)):
        return [_settings(inner) for inner in value]
    return _settings(value.to_dict()) if hasattr(value, "to_dict") else value
