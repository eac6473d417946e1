"""What a loaded language model is: facts that are found by running it on a few tokens.

Nothing is known by name: what the modules of a model took and gave says what they are. A model is tried on views of it
that are thrown away (:func:`trial`): whatever is set on these, nothing has to be put back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import backbone
from .attention.changes import BehindPrefix
from .attention.function import ATTENTION
from .attention.observers import Census
from .precision import without_autocast
from .prefixes import Prefixes
from .run import Hook, Pass, hooked, passing
from .view import has_a_forward_of_its_own, twin

#: What a model raises that cannot be run in some way.
CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError)

#: What models are tried on: two texts that share their first token and their last.
TOKENS = ((0, 1, 2, 3), (0, 2, 1, 3))


_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Anatomy:
    """What a loaded language model is.

    Attributes:
        is_causal: Whether a token's state knows nothing of later tokens.
        calling: Indices of the layers that call our attention function.
        calls_our_attention: Whether what it gives is what these layers expect. A name in the configuration is not yet a
            call of the function: BLOOM and Falcon have code of their own.
        needs_explicit_softmax: Whether any of them asks for a softmax that the fused kernels do not know (soft cap,
            sinks).
        map_layers: Where our function is not called: the layers whose attention maps the model hands out itself.
        maps_are_sound: Whether the model computes the same states when it hands out its maps.
        layers: Paths of the layers, in the order in which they run; empty if none were found that take and give states.
        norm: Paths of what stands between the last layer and the last hidden state: a norm, a projection, both, or
            nothing. None: the model does more to its last layer's states than its children do.
        projections: Paths of the output projection of each layer that has attention; those not found are missing.
        widths: How many values a state has behind each layer, and last how many the last hidden state has.
        further: What is found when it is first asked for.
    """

    is_causal: bool
    calling: tuple[int, ...]
    calls_our_attention: bool
    needs_explicit_softmax: bool
    map_layers: tuple[int, ...]
    maps_are_sound: bool
    layers: tuple[str, ...]
    norm: tuple[str, ...] | None
    projections: Mapping[int, str]
    widths: tuple[int, ...]
    further: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have attention, in whatever code."""
        return self.calling or self.map_layers

    def of_the_first(self, layers: int) -> Anatomy:
        """That of the model which stops after its first layers."""
        return replace(
            self,
            calling=tuple(layer for layer in self.calling if layer < layers),
            map_layers=tuple(layer for layer in self.map_layers if layer < layers),
            layers=self.layers[:layers],
            projections={layer: path for layer, path in self.projections.items() if layer < layers},
            widths=(*self.widths[:layers], self.widths[-1]),
        )


class Call(NamedTuple):
    """One call of a module: the first thing that it was given, and what it gave."""

    module: nn.Module
    given: Any
    gave: Any


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """What a model is, found once: it stays with the model, goes with views of it, and is that of a compiled one."""
    found = getattr(model, "st_reba_anatomy", None)
    return cast(Anatomy, found) if found is not None else keep(model, probe(model))


def keep(model: PreTrainedModel, anatomy: Anatomy) -> Anatomy:
    """Let this be known of a model."""
    vars(model)["st_reba_anatomy"] = anatomy
    return anatomy


def once(model: PreTrainedModel, name: str, find: Callable[[PreTrainedModel], _Value]) -> _Value:
    """A further fact of a model, found when it is first asked for of the model or of a view of it."""
    further = anatomy_of(model).further
    if name not in further:
        further[name] = find(model)
    return cast(_Value, further[name])


def trial(model: PreTrainedModel) -> PreTrainedModel:
    """A view of a model to be tried and thrown away, in evaluation mode.

    A forward of a module's own, as torch.compile leaves it, would run what the view is a copy of: the class's is run.
    """
    # Of what torch.compile made, the model within.
    tried = twin(getattr(model, "_orig_mod", model)).eval()
    for module in tried.modules():
        if has_a_forward_of_its_own(module):
            del module.forward
    return tried


def output_on(tried: PreTrainedModel, attention: str | None = None, **kwargs: Any) -> Any:
    """What a model that is tried gives for :data:`TOKENS`.

    Without gradients and autocast, whose rounding would look like another result. Hidden states are not asked for:
    transformers then leaves hooks that cannot be pickled.

    Args:
        tried: From :func:`trial`.
        attention: The attention implementation that it is asked to use; None: its own.
        **kwargs: For its forward.
    """
    if attention is not None:
        set_attention(tried, attention)
    device = backbone.device(tried)
    with torch.inference_mode(), without_autocast(device):
        input_ids = torch.tensor(TOKENS, device=device)
        return tried(input_ids=input_ids, return_dict=True, **backbone.without_hidden_states(tried), **kwargs)


def probe(model: PreTrainedModel) -> Anatomy:
    """Find out what a model is, by one pass over :data:`TOKENS`; by three where it has attention of its own."""
    census = Census()
    try:
        with passing(Pass(census=census)):
            tried, output, calls = _noted(model, ATTENTION)
    except CANNOT_RUN:
        census = Census()
        tried, output, calls = _noted(model)
    states, calling = output.last_hidden_state, tuple(census.layers)
    calls_ours, sound = bool(calling), True
    map_layers: tuple[int, ...] = ()
    if census.unknown or not calling:
        eager = "eager" if model.config._attn_implementation == ATTENTION else None
        own = output_on(trial(model), eager).last_hidden_state
        calls_ours = calls_ours and close(states, own)
        if not calls_ours:
            map_layers, sound = _maps(model, own)
    paths = {module: path for path, module in tried.named_modules()}
    # A module that is called more than once is what it is the first time.
    first = {call.module: call for call in reversed(calls)}
    layers = _layers(tried, first)
    norm = _norm(tried, paths, layers, calls, states)
    attending = [index for index in calling or map_layers if index < len(layers)]
    projections = {index: _projection(layers[index], calls) for index in attending}
    return Anatomy(
        # The two texts share their first token and differ in the second.
        is_causal=close(*states[:, 0]),
        calling=calling,
        calls_our_attention=calls_ours,
        needs_explicit_softmax=census.explicit,
        map_layers=map_layers,
        maps_are_sound=sound,
        layers=tuple(paths[layer] for layer in layers),
        norm=norm,
        projections={index: paths[module] for index, module in projections.items() if module is not None},
        widths=(*(states_of(first[layer].gave).shape[-1] for layer in layers), states.shape[-1]),
    )


def _noted(model: PreTrainedModel, attention: str | None = None) -> tuple[PreTrainedModel, Any, list[Call]]:
    """A pass of a model that is tried, and the calls of its modules, those that ended first first."""
    tried = trial(model)
    calls: list[Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call(module, next(iter((*args, *kwargs.values())), None), output))

    for module in tried.modules():
        module.register_forward_hook(note, with_kwargs=True)
    return tried, output_on(tried, attention), calls


def _maps(model: PreTrainedModel, own: Tensor) -> tuple[tuple[int, ...], bool]:
    """The layers whose maps a model hands out, and whether it then computes the states that it gives on its own."""
    try:
        output = output_on(trial(model), "eager", output_attentions=True)
    except CANNOT_RUN:
        return (), False
    maps = output.get("attentions") or ()
    layers = tuple(index for index, weights in enumerate(maps) if weights is not None)
    return layers, bool(layers) and close(output.last_hidden_state, own)


def _layers(tried: PreTrainedModel, calls: Mapping[nn.Module, Call]) -> list[nn.Module]:
    """The outermost list that is as long as the model is deep, of modules that took states and gave states."""
    for found in tried.modules():
        if isinstance(found, nn.ModuleList) and len(found) == backbone.depth(tried):
            called = [calls[layer] for layer in found if layer in calls]
            pairs = [(call.given, states_of(call.gave)) for call in called]
            if len(called) == len(found) and all(isinstance(states, Tensor) for pair in pairs for states in pair):
                return list(found)
    return []


def _norm(
    tried: PreTrainedModel,
    paths: Mapping[nn.Module, str],
    layers: Sequence[nn.Module],
    calls: Sequence[Call],
    wanted: Tensor,
) -> tuple[str, ...] | None:
    """The siblings of the layers' list that lead from the last layer's states to the last hidden state."""
    if not layers:
        return None
    siblings = set(tried.get_submodule(paths[layers[-1]].rpartition(".")[0].rpartition(".")[0]).children())
    steps: list[str] = []
    states = None
    for call in calls:
        if call.module is layers[-1]:
            steps, states = [], states_of(call.gave)
        elif states is not None and call.module in siblings and _same(call.given, states):
            steps.append(paths[call.module])
            states = call.gave
    return tuple(steps) if _same(states, wanted) else None


def _projection(layer: nn.Module, calls: Sequence[Call]) -> nn.Module | None:
    """The last module with weights that is called within the attention, unless it is given what attention is given."""
    # What bears the layer's number; of several, one within the other, the innermost.
    outer = next((part for part in layer.modules() if part is not layer and _is_numbered(part)), None)
    if outer is None:
        return None
    attention = [part for part in outer.modules() if _is_numbered(part)][-1]
    inside = set(attention.modules()) - {attention}
    given = next((call.given for call in calls if call.module is attention), None)
    last = next((call for call in reversed(calls) if call.module in inside and _has_weights(call.module)), None)
    # In some architectures the projection stands beside the attention, and the last within it makes the values.
    return None if last is None or _same(last.given, given) else last.module


def _is_numbered(module: nn.Module) -> bool:
    """Whether a module knows which layer it is of: what reads a cache does, under the one name or, in GPT-Neo, the
    other."""
    return hasattr(module, "layer_idx") or hasattr(module, "layer_id")


def _has_weights(module: nn.Module) -> bool:
    """Quantised ones may be buffers; those of a norm have one dimension."""
    return any(weight.dim() > 1 for weight in (*module.parameters(), *module.buffers()))


def states_of(output: Any) -> Any:
    """What a layer gives, of which some architectures make a tuple with the states first."""
    return output[0] if isinstance(output, tuple) else output


def _same(value: Any, wanted: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and isinstance(wanted, Tensor)
        and (value.shape, value.dtype, value.device) == (wanted.shape, wanted.dtype, wanted.device)
        and torch.equal(value, wanted)
    )


def close(states: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding in the model's own precision."""
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    return bool((states - expected).float().norm() <= tolerance * expected.float().norm())


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Ask for an attention implementation, without the log line that answers where an architecture cannot follow."""
    # Not by its level: to set it takes longer than all the rest here, since each logger that there is forgets its own.
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_an_error)
    try:
        model.set_attn_implementation(name)
    finally:
        logger.removeFilter(_is_an_error)
    if name == "eager":
        # Falcon reads this name at every call, yet does not let the public method set it.
        model.config._attn_implementation = name


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def layer_paths(model: PreTrainedModel) -> tuple[str, ...]:
    """Paths of the layers of a model, in the order in which they run.

    Raises:
        ValueError: If they are not found.
    """
    layers = anatomy_of(model).layers
    if not layers:
        raise ValueError(f"The layers of {type(model).__name__} were not found. Use another model.")
    return layers


def final_norm(model: PreTrainedModel) -> nn.Sequential:
    """What stands between the last layer and the last hidden state: a norm, a projection, both, or nothing.

    Raises:
        ValueError: If the model does more to its last layer's states than its children do.
    """
    norm = anatomy_of(model).norm
    if norm is None:
        raise ValueError(
            f"{type(model).__name__} changes its last layer's states in a way that could not be found, so those of "
            "earlier layers cannot be read alike. Use another model."
        )
    return nn.Sequential(*(model.get_submodule(path) for path in norm))


def without_final_norm(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """In this block, the model gives the states that its last layer leaves.

    The norm runs all the same, which costs next to nothing, and hands on what it was given.
    """
    return hooked({module: _passing_on() for module in final_norm(model)})


def _passing_on() -> Hook:
    given: list[Tensor] = []

    def before(states: Tensor) -> Tensor:
        given.append(states)
        return states

    return Hook(before, lambda states: given.pop())


def output_projections(model: PreTrainedModel) -> Mapping[int, str]:
    """Paths of the output projection of each layer that has attention, by the index of the layer.

    What a projection is given are the values of all heads, weighted and side by side; what it gives, the layer adds to
    its residual stream. It is ``o_proj``, ``c_proj``, ``dense`` or ``out_proj``, among other names.

    Raises:
        ValueError: If the model has no attention, or does not project it with a module of its own.
    """
    name, anatomy = type(model).__name__, anatomy_of(model)
    if not anatomy.attention_layers:
        raise ValueError(f"{name} has no attention whose values could be read. Use a model with attention layers.")
    for index in anatomy.attention_layers:
        if index not in anatomy.projections:
            raise ValueError(
                f"The output projection of the attention in layer {index} of {name} was not found. Use an architecture "
                "that has it as a module, such as Llama, Qwen or GPT-2."
            )
    return anatomy.projections


def feed_forward(model: PreTrainedModel) -> tuple[str, ...]:
    """Paths of the parts of a model's last layer that look at one position at a time: its feed-forward part, in most.

    Found by one pass: such a part makes of one state alone what it made of it among others. Norms are not looked at.
    """
    layers = anatomy_of(model).layers
    return once(model, f"feed-forward part of layer {len(layers)}", _feed_forward) if layers else ()


def _feed_forward(model: PreTrainedModel) -> tuple[str, ...]:
    layers = anatomy_of(model).layers
    tried, _, calls = _noted(model, ATTENTION if anatomy_of(model).calling else None)
    parts = set(tried.get_submodule(layers[-1]).children())
    paths = {module: path for path, module in tried.named_modules()}
    found = []
    for call in (call for call in list(calls) if call.module in parts and _has_weights(call.module)):
        # Experts also give which of them were chosen.
        given, gave = call.given, states_of(call.gave)
        if all(isinstance(states, Tensor) and states.dim() == 3 for states in (given, gave)):
            try:
                with torch.inference_mode(), without_autocast(given.device):
                    alone = states_of(call.module(given[:1, 1:2]))
            except CANNOT_RUN:
                continue
            if alone.shape == gave[:1, 1:2].shape and close(alone, gave[:1, 1:2]):
                found.append(paths[call.module])
    return tuple(found)


def embedding_scale(model: PreTrainedModel) -> float | None:
    """What the input embeddings multiply the entries of their table with; None if that cannot be said."""
    embeddings = trial(model).get_input_embeddings()
    table = cast(Tensor, embeddings.weight)
    if table.device.type == "meta":
        return None
    with torch.inference_mode(), without_autocast(table.device):
        ids = torch.arange(min(8, len(table)), device=table.device)
        rows, gave = table[ids].double(), embeddings(ids)
        scale = float((rows * gave.double()).sum() / rows.square().sum().clamp(min=torch.finfo(rows.dtype).tiny))
        return scale if close(gave, (rows * scale).to(gave.dtype)) else None


def reuses_cache(model: PreTrainedModel) -> bool:
    """Whether new tokens behind cached prefixes of unequal lengths give what they give in the whole text.

    They are given as input embeddings, at positions and with a mask of our own.
    """
    anatomy = anatomy_of(model)
    every_layer = anatomy.calls_our_attention and len(anatomy.calling) == backbone.depth(model)
    return every_layer and once(model, "reuses its cache", _reuses_cache)


def _reuses_cache(model: PreTrainedModel) -> bool:
    tried = trial(model)
    try:
        expected = output_on(tried, ATTENTION).last_hidden_state
        device = backbone.device(tried)
        ids, lengths, new = torch.tensor(TOKENS, device=device), torch.tensor([2, 1], device=device), 2
        position_ids = lengths[:, None] + torch.arange(new, device=device)
        with torch.inference_mode(), without_autocast(device):
            prefixes = Prefixes.computed(tried, ids[:, : int(lengths.max())], lengths)
            with passing(Pass(masking=BehindPrefix(lengths, new))):
                output = tried(
                    inputs_embeds=tried.get_input_embeddings()(ids.gather(1, position_ids)),
                    position_ids=position_ids,
                    past_key_values=prefixes.cache(torch.arange(len(ids), device=device)),
                    use_cache=True,
                    return_dict=True,
                    **backbone.without_hidden_states(tried),
                )
    except CANNOT_RUN:
        return False
    behind = position_ids.to(expected.device)[..., None].expand(-1, -1, expected.shape[2])
    return close(output.last_hidden_state, expected.gather(1, behind))
