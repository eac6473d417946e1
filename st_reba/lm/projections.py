"""Where a language model's attention ends: the output projection of each layer.

It is ``o_proj``, ``c_proj``, ``dense`` or ``out_proj``, among other names; what it is, is found by trial.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .backbone import attention_layers
from .decoder import inspect, states_of, trial
from .hooks import Places, Tap, listen, tapping

# Enough for the last token to look at others, of which it knows nothing else.
_TRIAL = [[0, 1, 2, 3]]


def output_projections(model: PreTrainedModel) -> Places:
    """The output projection of each layer that has attention.

    What it is given are the values of all heads, weighted and side by side; what it gives, the layer adds to its
    residual stream.

    Returns:
        Where they are, by the index of the layer.

    Raises:
        ValueError: If the model has no attention, or does not project it with a module of its own.
    """
    name = type(model).__name__
    attending = attention_layers(model)
    if not attending:
        raise ValueError(f"{name} has no attention whose values could be read. Use a model with attention layers.")
    layers = inspect(model).layers
    calls = _two_trials(model, layers)
    found = {}
    for index in attending:
        projection = _projection(layers[index], calls) if index < len(layers) else None
        if projection is None:
            raise ValueError(
                f"The output projection of the attention in layer {index} of {name} was not found. Use an architecture "
                "that has it as a module, such as Llama, Qwen or GPT-2."
            )
        found[index] = projection
    return Places(model, found)


class _Twice(NamedTuple):
    """One call of a module in each of two trial runs."""

    module: nn.Module
    given: tuple[Any, Any]
    gave: tuple[Any, Any]


def _two_trials(model: PreTrainedModel, layers: list[nn.Module]) -> list[_Twice]:
    """What modules take and give in two runs, in whose every layer the last state is the same and those before are not.

    They are negated, not exchanged: a token that takes nearly all attention (often the first) would have it anywhere.
    """
    kept: dict[nn.Module, Tensor] = {}

    def keep(layer: nn.Module, states: Tensor) -> Tensor:
        kept[layer] = states.clone()
        return states

    def negate_past(layer: nn.Module, states: Tensor) -> Tensor:
        return torch.cat([-kept[layer][:, :-1], kept[layer][:, -1:]], dim=1)

    listen(layers)
    runs = []
    for change in (keep, negate_past):
        with tapping({layer: Tap(before=partial(change, layer)) for layer in layers}):
            runs.append(trial(model, _TRIAL)[1])
    again = {call.module: call for call in runs[1]}
    return [
        _Twice(call.module, (call.given, again[call.module].given), (call.gave, again[call.module].gave))
        for call in runs[0]
        if call.module in again
    ]


def _projection(layer: nn.Module, calls: list[_Twice]) -> nn.Module | None:
    """The last module with weights in what turns equal last states into unequal ones, if it is given these."""
    inside = set(layer.modules()) - {layer}
    attention = next(
        (
            call.module
            for call in calls
            if call.module in inside and _same_end(call.given) is True and _same_end(call.gave) is False
        ),
        None,
    )
    if attention is None:
        return None
    parts = set(attention.modules()) - {attention}
    weighted = [call for call in calls if call.module in parts and _has_weights(call.module)]
    return weighted[-1].module if weighted and _same_end(weighted[-1].given) is False else None


def _same_end(values: tuple[Any, Any]) -> bool | None:
    """Whether the last of two runs' states are equal, to the bit: a small effect in half precision is one. None for
    what is not states."""
    one, other = map(states_of, values)
    if not all(isinstance(states, Tensor) and states.shape[:2] == (1, len(_TRIAL[0])) for states in (one, other)):
        return None
    return torch.equal(one[:, -1], other[:, -1])


def _has_weights(module: nn.Module) -> bool:
    """Quantised ones may be buffers; those of a norm have one dimension."""
    return any(weight.dim() > 1 for weight in (*module.parameters(), *module.buffers()))
