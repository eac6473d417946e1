"""Where a language model keeps its layers, and what it is without those above one of them.

Nothing is known by name: a model is run on two tokens, and what its modules took and gave says what they are.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType, NoneType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .backbone import close, depth, device, dry_run, without_hidden_states
from .hooks import Places, Tap, listen, tapping


@dataclass(frozen=True)
class Call:
    """One call of a module in a trial run: the first thing that it was given, and what it gave."""

    module: nn.Module
    given: Any
    gave: Any


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
    """Find the layers of a model and what stands behind them.

    The final norm is those direct children whose outputs lead up to the last hidden state (in OPT two, a norm and a
    projection; in a model without one, none).

    Raises:
        ValueError: If the model does more to its last layer's states than its children do.
    """
    return _inspect(model, *trial(model))


def _inspect(model: PreTrainedModel, output: Any, calls: Sequence[Call]) -> Decoder:
    wanted = output.last_hidden_state
    # Where the layers live: OPT and models that also see images wrap the decoder in a model of the same output.
    owner: nn.Module = model
    while inner := [
        call.module
        for call in calls
        if call.module in owner.children() and _same(getattr(call.gave, "last_hidden_state", None), wanted)
    ]:
        owner = inner[0]
    steps: list[nn.Module] = []
    for call in reversed(calls):
        if call.module in owner.children() and _same(call.gave, wanted):
            steps.insert(0, call.module)
            wanted = call.given
    if not any(_same(states_of(call.gave), wanted) for call in calls):
        raise ValueError(
            f"{type(model).__name__} changes its last layer's states in a way that could not be found, so those of "
            "earlier layers cannot be read alike. Use another model."
        )
    lists = [child for child in owner.children() if isinstance(child, nn.ModuleList)]
    layers = next((list(found) for found in lists if len(found) == depth(model)), [])
    return Decoder(owner, layers, nn.Sequential(*steps))


def trial(model: PreTrainedModel, input_ids: Sequence[Sequence[int]] = ((0, 1),)) -> tuple[Any, list[Call]]:
    """Run a model on a few tokens, without dropout.

    Hidden states are not asked for: transformers then leaves hooks on the model that cannot be pickled.

    Returns:
        Its output, and the calls of its modules, those that ended first first.
    """
    calls: list[Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call(module, next(iter((*args, *kwargs.values())), None), output))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        with dry_run(model):
            ids = torch.tensor(input_ids, device=device(model))
            return model(input_ids=ids, return_dict=True, **without_hidden_states(model)), calls
    finally:
        for hook in hooks:
            hook.remove()


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
    output, calls = trial(model)
    found = _inspect(model, output, calls)
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
    states = next(states_of(call.gave) for call in calls if call.module is found.layers[layers - 1])
    with dry_run(short):
        expected = found.norm(states)
        ids = torch.tensor([[0, 1]], device=device(model))
        if not close(
            short(input_ids=ids, return_dict=True, **without_hidden_states(short)).last_hidden_state, expected
        ):
            raise ValueError(f"{reason}: it then computes something else. Use output_layer=-1, all layers.")
    return short


def _shortened_config(model: PreTrainedModel, layers: int) -> PreTrainedConfig | None:
    """The configuration of the first layers; None if it would not load again."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    whole = depth(model)
    given = dict(vars(text))
    for name, value in given.items():
        if isinstance(value, list) and len(value) == whole:
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
        return tapping({self._places.at(model, number): _passing_on() for number in self._places.paths})


def _passing_on() -> Tap:
    """A module that gives what it was given."""
    given: list[Tensor] = []

    def before(states: Tensor) -> Tensor:
        given.append(states)
        return states

    return Tap(before, lambda states: given.pop())


class PositionWise:
    """The parts of a model's last layer that look at one position at a time, and so need only those that are read.

    What they do is found by trial: a module whose output at a position is the same without the other positions. In most
    architectures that is the feed-forward part, two thirds of a layer.

    Args:
        model: The language model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        layers = inspect(model).layers
        self.modules = _position_wise(model, layers[-1]) if layers else []
        listen(self.modules)

    def at(self, read: Tensor) -> contextlib.AbstractContextManager[None]:
        """Compute them at these positions alone, (B, N) booleans, in this block; elsewhere their output is zero."""

        def before(states: Tensor) -> Tensor:
            return states[read.to(states.device)][None]

        def after(states: Tensor) -> Tensor:
            whole = states.new_zeros(*read.shape, states.shape[-1])
            return whole.index_put((read.to(states.device),), states[0])

        return tapping(dict.fromkeys(self.modules, Tap(before, after)))


def _position_wise(model: PreTrainedModel, layer: nn.Module) -> list[nn.Module]:
    _, calls = trial(model, [[0, 1, 2]])
    children = list(layer.children())
    found = []
    for call in calls:
        # Norms are not worth the trouble, and what has no large weights is cheap.
        if call.module not in children or not any(weight.dim() > 1 for weight in call.module.parameters()):
            continue
        if not isinstance(call.given, Tensor) or call.given.dim() != 3 or not isinstance(call.gave, Tensor):
            continue
        try:
            with dry_run(model):
                alone = call.module(call.given[:, 1:2])
        except Exception:  # it takes more than states
            continue
        if isinstance(alone, Tensor) and alone.shape == (1, 1, call.given.shape[2]) and close(alone, call.gave[:, 1:2]):
            found.append(call.module)
    return found


def layer_places(model: PreTrainedModel) -> Places:
    """The layers of a model, by their indices, to be tapped.

    Raises:
        ValueError: If they are not found.
    """
    layers = inspect(model).layers
    if not layers:
        raise ValueError(f"The layers of {type(model).__name__} were not found. Use another model.")
    return Places(model, dict(enumerate(layers)))


def states_of(output: Any) -> Any:
    """What a layer gives, of which some architectures make a tuple with the states first."""
    return output[0] if isinstance(output, tuple) else output


def _same(value: Any, wanted: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and (value.shape, value.dtype, value.device) == (wanted.shape, wanted.dtype, wanted.device)
        and torch.equal(value, wanted)
    )
