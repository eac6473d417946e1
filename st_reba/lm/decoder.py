"""A language model's layers, and what it is without those above one of them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType, NoneType
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..text.layout import sent
from .anatomy import Anatomy, stops_after
from .backbone import depth
from .hooks import Hook, Places, hooked, listen


@dataclass(frozen=True)
class Decoder:
    """The inside of a language model.

    Attributes:
        owner: The module that the layers belong to: the model itself, or one within it.
        layers: In the order in which they run; empty if they were not found.
        norm: What stands between the last layer and the last hidden state: a norm, a projection, both, or nothing.
    """

    owner: nn.Module
    layers: list[nn.Module]
    norm: nn.Sequential


def inspect(model: PreTrainedModel) -> Decoder:
    """The layers of a model and what stands behind them.

    Raises:
        ValueError: If the model does more to its last layer's states than its children do.
    """
    sketch = Anatomy(model).sketch
    if sketch.norm is None:
        raise ValueError(
            f"{type(model).__name__} changes its last layer's states in a way that could not be found, so those of "
            "earlier layers cannot be read alike. Use another model."
        )
    layers, norm = ([model.get_submodule(path) for path in paths] for paths in (sketch.layers, sketch.norm))
    return Decoder(model.get_submodule(sketch.owner), layers, nn.Sequential(*norm))


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


def shortened(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model that stops after its first layers, and ends in the same norm.

    It shares its weights with the one that was given, which stays as it is. Saved, it is a model of so many layers.

    Raises:
        ValueError: If the architecture cannot be shortened, or accelerate has placed the model.
    """
    if layers == depth(model):
        return model
    name = type(model).__name__
    reason = f"{name} cannot be shortened to {layers} layers"
    if hasattr(model, "_hf_hook"):
        raise ValueError(
            f"{reason}, because accelerate has placed it on its devices. Load it without device_map, or use "
            "output_layer=-1, all layers."
        )
    found = inspect(model)
    if not found.layers:
        raise ValueError(f"{reason}, because its layers were not found. Use output_layer=-1, all layers.")
    config = _shortened_config(model, layers)
    if config is None:
        raise ValueError(
            f"{reason}, because its configuration says more about its layers than how many there are. Use "
            "output_layer=-1, all layers, or another model."
        )
    whole = next(part for part in found.owner.children() if next(part.children(), None) is found.layers[0])
    top = nn.ModuleList(found.layers[:layers])
    top.training = whole.training
    try:
        short = cast(PreTrainedModel, _shallow(model, partial(_shortened_part, config), {whole: top}))
    except _NotToBeCopiedError:
        raise ValueError(
            f"{reason}, because its forward is not its class's own: torch.compile leaves it so. Compile the module's "
            "model after the module is made, or use output_layer=-1, all layers."
        ) from None
    if not stops_after(short, layers, model):
        raise ValueError(f"{reason}: it then computes something else. Use output_layer=-1, all layers.")
    return short


#: The lists of transformers' configurations that have an entry for each layer. Any other list may happen to be as long:
#: the ids of end tokens, or the directions of a rotary embedding.
_PER_LAYER = frozenset(
    {
        "activation_sparsity_pattern",
        "attention_layers",
        "attention_window",
        "full_attn_idxs",
        "indexer_types",
        "intermediate_size",
        "kv_source_layers",
        "layer_rope_theta",
        "layer_types",
        "layers_block_type",
        "layers_num_experts",
        "mlp_layer_types",
        "moe_layers",
        "moe_topk",
        "no_rope_layers",
        "num_attention_heads",
        "num_attention_heads_per_layer",
        "num_experts",
        "num_key_value_heads",
        "num_key_value_heads_per_layer",
        "rope_scaling_layers",
        "sliding_windows",
        "swiglu_limits",
        "swiglu_limits_shared",
    }
)


def _shortened_config(model: PreTrainedModel, layers: int) -> PreTrainedConfig | None:
    """The configuration of the first layers; None if it would not load again."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    whole = depth(model)
    given = dict(vars(text))
    for name, value in given.items():
        if name in _PER_LAYER and isinstance(value, list) and len(value) == whole:
            object.__setattr__(text, name, value[:layers])
    text.num_hidden_layers = layers
    try:
        again = type(config).from_dict(config.to_dict())
    except Exception:  # whatever a configuration's own checks raise
        return None
    return config if again.get_text_config(decoder=True).num_hidden_layers == layers else None


def _shortened_part(config: PreTrainedConfig, part: PreTrainedConfig) -> PreTrainedConfig:
    """What becomes of the configuration of a part of the model."""
    return config if type(part) is type(config) else config.get_text_config(decoder=True)


def view(model: PreTrainedModel) -> PreTrainedModel:
    """A model that shares the weights and hooks of the one that was given, and has a configuration of its own.

    How a model attends stands in its configuration, so what is set on the view changes nothing for others who use the
    same weights, whatever becomes of the view. Adapters that are added to either are seen by both.

    Returns:
        The model itself where its forward is not its class's own (as ``torch.compile`` leaves it): a copy would run
        what it is a copy of.
    """
    memo: dict[int, Any] = {}
    try:
        return cast(PreTrainedModel, _shallow(model, lambda config: copy.deepcopy(config, memo), {}))
    except _NotToBeCopiedError:
        return model


class _NotToBeCopiedError(Exception):
    """A module's forward belongs to that module alone."""


def _shallow(module: Any, configured: Callable[[Any], Any], instead: Mapping[nn.Module, nn.Module]) -> Any:
    """The same module with another configuration, and other modules in place of some.

    What reads the configuration is copied, with what leads to it, as it reads there how to attend; what has weights is
    shared.

    Raises:
        _NotToBeCopiedError: If what must be copied cannot be.
    """
    children = {
        name: child and _shallow(instead.get(child, child), configured, instead)
        for name, child in module._modules.items()
    }
    changed = any(child is not module._modules[name] for name, child in children.items())
    if not changed and "config" not in vars(module):
        return module
    if not isinstance(vars(module).get("forward"), (NoneType, MethodType, partial)):
        raise _NotToBeCopiedError
    twin = copy.copy(module)
    vars(twin).update({name: _rebound(value, module, twin) for name, value in vars(module).items()})
    if changed:
        # Else it stays the same dict, in which an adapter takes the place of a module for all who share it.
        vars(twin)["_modules"] = children
    if "config" in vars(module):
        twin.config = configured(module.config)
    return twin


def _rebound(value: Any, module: nn.Module, twin: nn.Module) -> Any:
    """A method of a module, as accelerate puts it there, as one of its twin's; any other value as it is."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, twin)
    if isinstance(value, partial) and value.args and value.args[0] is module:
        return partial(value.func, twin, *value.args[1:], **value.keywords)
    return value


class FinalNorm:
    """What stands between a model's last layer and its last hidden state, to be left out for a while.

    It runs all the same, which costs next to nothing, and hands on what it was given.

    Args:
        model: The language model.

    Raises:
        ValueError: If the model does more to its last layer's states than its children do.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._places = Places(model, dict(enumerate(inspect(model).norm)))

    def left_out(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """In this block, the model, or a copy of it, gives the states that its last layer leaves."""
        return hooked({self._places.at(model, number): _passing_on() for number in self._places.paths})


def _passing_on() -> Hook:
    """A module that gives what it was given."""
    given: list[Tensor] = []

    def before(states: Tensor) -> Tensor:
        given.append(states)
        return states

    return Hook(before, lambda states: given.pop())


class PositionWise:
    """The parts of a model's last layer that look at one position at a time, and so need only those that are read.

    In most architectures that is the feed-forward part, two thirds of a layer.

    Args:
        model: The language model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        anatomy, last = Anatomy(model), len(inspect(model).layers) - 1
        paths = anatomy.position_wise(last) if last >= 0 else ()
        self.modules = [model.get_submodule(path) for path in paths]
        listen(self.modules)

    def at(self, read: Tensor) -> contextlib.AbstractContextManager[None]:
        """Compute them at these positions alone, in this block; elsewhere their output is zero.

        Args:
            read: (B, N), boolean, in the host's memory.
        """
        # Counted in the host's memory: it would wait for all that an accelerator has still to do.
        places = read.nonzero(as_tuple=True)

        def before(states: Tensor) -> Tensor:
            return states[tuple(sent(place, states.device) for place in places)][None]

        def after(states: Tensor) -> Tensor:
            whole = states.new_zeros(*read.shape, states.shape[-1])
            return whole.index_put(tuple(sent(place, states.device) for place in places), states[0])

        return hooked(dict.fromkeys(self.modules, Hook(before, after)))


class FeedForward:
    """The feed-forward part of a model's last layer, to be left out for a while.

    The layer then gives what its attention has added to, in most architectures the residual stream between the two
    parts; where both read the layer's input side by side, that input with what attention adds.

    Args:
        model: The language model.

    Raises:
        ValueError: If no part of its last layer looks at one position at a time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        anatomy, last = Anatomy(model), len(inspect(model).layers) - 1
        paths = anatomy.position_wise(last) if last >= 0 else ()
        if not paths:
            raise ValueError(
                f"The feed-forward part of the last layer of {type(model).__name__} was not found as a part of its "
                'own, so the state before it cannot be read. Use readout="layer".'
            )
        self._places = Places(model, {number: model.get_submodule(path) for number, path in enumerate(paths)})

    def left_out(self, model: nn.Module) -> dict[nn.Module, Hook]:
        """What leaves it out of the model, or of a copy of it: it adds zeros, and is run for one token alone."""
        return {self._places.at(model, number): _adding_nothing() for number in self._places.paths}


def _adding_nothing() -> Hook:
    """A part that gives zeros, whatever it is given."""
    given: list[Tensor] = []

    def before(states: Tensor) -> Tensor:
        given.append(states)
        # Not none: experts and kernels need not take it.
        return states[:1, :1]

    def after(states: Tensor) -> Tensor:
        return states.new_zeros(*given.pop().shape[:-1], states.shape[-1])

    return Hook(before, after)


def layer_places(model: PreTrainedModel) -> Places:
    """The layers of a model, by their indices, to be hooked.

    Raises:
        ValueError: If they are not found.
    """
    layers = inspect(model).layers
    if not layers:
        raise ValueError(f"The layers of {type(model).__name__} were not found. Use another model.")
    return Places(model, dict(enumerate(layers)))
