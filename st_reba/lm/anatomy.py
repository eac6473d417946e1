"""What a loaded language model is: facts that are found by running it on a few tokens.

Nothing is known by name: what the modules of a model took and gave says what they are. A model is tried on views of it
that are thrown away (:func:`trial`): whatever is set on these, nothing has to be put back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from . import backbone
from .attention.changes import BehindPrefix
from .attention.function import ATTENTION
from .attention.observers import Census
from .backbone import first_layers, has_a_forward_of_its_own, twin, without_autocast
from .run import Hook, Pass, PassChange, at, hooked, passing, put

#: What a model raises that cannot be run in some way.
CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError)

#: What models are tried on: two texts that share their first token and their last.
TOKENS = ((0, 1, 2, 3), (0, 2, 1, 3))


@dataclass
class Anatomy:
    """What a loaded language model is.

    Attributes:
        is_causal: Whether a token's state knows nothing of later tokens.
        attention_layers: Indices of the layers that have attention: those that call our attention function or, where it
            is not called, those whose attention maps the model hands out itself.
        calls_our_attention: Whether they call our attention function, and what it gives is what they expect. A name in
            the configuration is not yet a call of the function: BLOOM and Falcon have code of their own.
        needs_explicit_softmax: Whether any of them asks for a softmax that the fused kernels do not know (soft cap,
            sinks).
        layers: Paths of the layers, in the order in which they run; empty if none were found that take and give states.
        norm: Paths of what stands between the last layer and the last hidden state: a norm, a projection, both, or
            nothing. None: the model does more to its last layer's states than its children do.
        projections: Paths of the output projection of each layer that has attention; those not found are missing.
        feed_forward: Paths of the parts of the last layer that look at one position at a time, norms left out.
        widths: How many values a state has behind each layer, and last how many the last hidden state has.
        reuses_cache: See :func:`reuses_cache`; None until it is asked for.
    """

    is_causal: bool
    attention_layers: tuple[int, ...]
    calls_our_attention: bool
    needs_explicit_softmax: bool
    layers: tuple[str, ...]
    norm: tuple[str, ...] | None
    projections: Mapping[int, str]
    feed_forward: tuple[str, ...]
    widths: tuple[int, ...]
    reuses_cache: bool | None = None


class Call(NamedTuple):
    """One call of a module, by its path: the first thing that it was given, and the first that it gave."""

    path: str
    module: nn.Module
    given: Any
    gave: Any


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """What a model is, found once: it stays with the model, goes with views of it, and is that of a compiled one."""
    if not hasattr(model, "st_reba_anatomies"):
        model.st_reba_anatomies = {}  # type: ignore[assignment]
    # Of views that end earlier, too: by how many layers they have.
    known, layers = cast(dict[int, Anatomy], model.st_reba_anatomies), backbone.depth(model)
    if layers not in known:
        known[layers], _ = probe(model)
    return known[layers]


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


def output_on(tried: PreTrainedModel, attention: str | None = None, **inputs: Any) -> Any:
    """What a model that is tried gives.

    Without gradients and autocast, whose rounding would look like another result, and without the hidden states of all
    layers, for which transformers leaves hooks that cannot be pickled.

    Args:
        tried: From :func:`trial`.
        attention: The attention implementation that it is asked to use; None: its own.
        **inputs: For its forward; :data:`TOKENS` where neither tokens nor embeddings are given.
    """
    if attention is not None:
        set_attention(tried, attention)
    device = backbone.device(tried)
    if "input_ids" not in inputs and "inputs_embeds" not in inputs:
        inputs["input_ids"] = torch.tensor(TOKENS, device=device)
    with torch.inference_mode(), without_autocast(device):
        return tried(return_dict=True, output_hidden_states=False, **inputs)


def probe(model: PreTrainedModel) -> tuple[Anatomy, Tensor]:
    """What a model is, and the last hidden states that it gives for :data:`TOKENS`.

    It is run once; three times where it has attention of its own.
    """
    census = Census()
    try:
        with passing(Pass(census=census)):
            tried, states, calls = _noted(model, ATTENTION)
    except CANNOT_RUN:
        census = Census()
        tried, states, calls = _noted(model)
    attentions: Mapping[int, nn.Module | None] = census.attentions
    calls_ours = bool(attentions)
    if census.unknown or not attentions:
        name = "eager" if model.config._attn_implementation == ATTENTION else None
        own = output_on(trial(model), name).last_hidden_state
        calls_ours = calls_ours and close(states, own)
        if not calls_ours:
            attentions = dict.fromkeys(_attending(model))
    # A module that is called more than once is what it is the first time.
    first = {call.path: call for call in reversed(calls)}
    layers = _layers(tried, first)
    projections = {
        index: _projection(layers[index], attention, calls)
        for index, attention in attentions.items()
        if index < len(layers)
    }
    anatomy = Anatomy(
        # The two texts share their first token and differ in the second.
        is_causal=close(*states[:, 0]),
        attention_layers=tuple(attentions),
        calls_our_attention=calls_ours,
        needs_explicit_softmax=census.explicit,
        layers=layers,
        norm=_norm(layers[-1], calls, states) if layers else None,
        projections={index: path for index, path in projections.items() if path is not None},
        feed_forward=_feed_forward(layers[-1], calls) if layers else (),
        widths=(*(first[layer].gave.shape[-1] for layer in layers), states.shape[-1]),
    )
    return anatomy, states


def _noted(model: PreTrainedModel, attention: str | None = None) -> tuple[PreTrainedModel, Tensor, list[Call]]:
    """A model that is tried, its last hidden states, and the calls of its modules, those that ended first first."""
    tried = trial(model)
    calls: list[Call] = []

    def note(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call(path, module, next(iter((*args, *kwargs.values())), None), _first(output)))

    for path, module in tried.named_modules():
        module.register_forward_hook(partial(note, path), with_kwargs=True)
    return tried, output_on(tried, attention).last_hidden_state, calls


def _first(output: Any) -> Any:
    """The states that a module gives: some make a tuple with the states first."""
    return output[0] if isinstance(output, tuple) else output


def _attending(model: PreTrainedModel) -> list[int]:
    """The layers whose maps a model hands out."""
    try:
        output = output_on(trial(model), "eager", output_attentions=True)
    except CANNOT_RUN:
        return []
    return [index for index, weights in enumerate(output.get("attentions") or ()) if weights is not None]


def _layers(tried: PreTrainedModel, calls: Mapping[str, Call]) -> tuple[str, ...]:
    """The outermost list that is as long as the model is deep, of modules that took states and gave states."""
    for path, found in tried.named_modules():
        if isinstance(found, nn.ModuleList) and len(found) == backbone.depth(tried):
            layers = tuple(f"{path}.{index}" for index in range(len(found)))
            called = [calls[layer] for layer in layers if layer in calls]
            are_states = all(isinstance(call.given, Tensor) and isinstance(call.gave, Tensor) for call in called)
            if len(called) == len(layers) and are_states:
                return layers
    return ()


def _norm(last: str, calls: Sequence[Call], wanted: Tensor) -> tuple[str, ...] | None:
    """The siblings of the layers' list that lead from the last layer's states to the last hidden state."""
    owner = _parent(_parent(last))
    steps: list[str] = []
    states = None
    for call in calls:
        if call.path == last:
            steps, states = [], call.gave
        elif _parent(call.path) == owner and _same(call.given, states):
            steps.append(call.path)
            states = call.gave
    return tuple(steps) if _same(states, wanted) else None


def _projection(layer: str, attention: nn.Module | None, calls: Sequence[Call]) -> str | None:
    """The last module with weights that is called within the attention, unless it is given what attention is given.

    An attention that is not known reads a cache, for which it bears the layer's number, under the one name or, in
    GPT-Neo, the other: of several, one within the other, the innermost, which ends first.
    """
    # Looked for by the path first: a model has hundreds of modules.
    of_layer = [call for call in calls if call.path.startswith(f"{layer}.")]
    for path, module, given, _ in of_layer:
        is_numbered = hasattr(module, "layer_idx") or hasattr(module, "layer_id")
        if module is attention or (attention is None and is_numbered):
            inside = [call for call in of_layer if call.path.startswith(f"{path}.") and _has_weights(call.module)]
            # In some architectures the projection stands beside the attention, and the last within makes the values.
            return None if not inside or _same(inside[-1].given, given) else inside[-1].path
    return None


def _feed_forward(layer: str, calls: Sequence[Call]) -> tuple[str, ...]:
    """The parts of a layer that make of one state alone what they made of it among others."""
    found = []
    for path, module, given, gave in list(calls):
        is_part = _parent(path) == layer and _has_weights(module)
        if is_part and all(isinstance(states, Tensor) and states.dim() == 3 for states in (given, gave)):
            try:
                # Not the second: what precedes it may be a padding token, whose embedding is zero.
                with torch.inference_mode(), without_autocast(given.device):
                    alone = _first(module(given[:1, 2:3]))
            except CANNOT_RUN:
                continue
            if alone.shape == gave[:1, 2:3].shape and close(alone, gave[:1, 2:3]):
                found.append(path)
    return tuple(found)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _has_weights(module: nn.Module) -> bool:
    """Quantised ones may be buffers; those of a norm have one dimension."""
    return any(weight.dim() > 1 for weight in (*module.parameters(), *module.buffers()))


def _same(value: Any, wanted: Any) -> bool:
    """Whether both are the same states, to the bit."""
    if not isinstance(value, Tensor) or not isinstance(wanted, Tensor):
        return False
    return value.dtype == wanted.dtype and value.device == wanted.device and torch.equal(value, wanted)


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


def feed_forward_at(model: PreTrainedModel, position: Tensor, length: int) -> PassChange:
    """The last layer's feed-forward part runs for one token of each row, (B,), where no other of its N is read."""

    def only(states: Tensor) -> Tensor:
        return at(states, position)[:, None]

    def in_place(states: Tensor) -> Tensor:
        return put(states.new_zeros(len(states), length, states.shape[-1]), position, states[:, 0])

    return PassChange(
        hooks=dict.fromkeys(map(model.get_submodule, anatomy_of(model).feed_forward), Hook(only, in_place))
    )


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

    They are given as input embeddings, at positions and with a mask of our own: it is tried when it is first asked for.
    """
    anatomy = anatomy_of(model)
    if anatomy.reuses_cache is None:
        anatomy.reuses_cache = _reuses_cache(model, anatomy)
    return anatomy.reuses_cache


def _reuses_cache(model: PreTrainedModel, anatomy: Anatomy) -> bool:
    if not anatomy.calls_our_attention or len(anatomy.attention_layers) != backbone.depth(model):
        return False
    # Of masks of its own, ours know windows alone: in Llama 4, tokens see no further back than a chunk begins.
    if "chunked_attention" in (getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()):
        return False
    tried = trial(model)
    device = backbone.device(tried)
    ids, lengths = torch.tensor(TOKENS, device=device), torch.tensor([2, 1], device=device)
    positions = lengths[:, None] + torch.arange(2, device=device)
    cached = backbone.keeping(tried, DynamicCache())
    try:
        expected = output_on(tried, ATTENTION).last_hidden_state
        output_on(tried, input_ids=ids[:, :2], **cached)
        new = tried.get_input_embeddings()(ids.gather(1, positions))
        with passing(Pass(masking=BehindPrefix(lengths, 2))):
            states = output_on(tried, inputs_embeds=new, position_ids=positions, **cached).last_hidden_state
    except CANNOT_RUN:
        return False
    behind = positions.to(expected.device)[..., None].expand(-1, -1, expected.shape[2])
    return close(states, expected.gather(1, behind))


def shortened(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model that stops after its first layers, and ends in the same norm.

    It shares its weights with the one that was given, which stays as it is. Saved, it is a model of so many layers.

    Raises:
        ValueError: If the architecture cannot be shortened, or accelerate has placed the model.
    """
    if layers == backbone.depth(model):
        return model
    reason, all_layers = f"{type(model).__name__} cannot be shortened to {layers} layers", "output_layer=-1, all layers"
    if hasattr(model, "_hf_hook"):
        raise ValueError(
            f"{reason}, because accelerate has placed it on its devices. Load it without device_map, or use "
            f"{all_layers}."
        )
    anatomy, norm = anatomy_of(model), final_norm(model)
    if any(map(has_a_forward_of_its_own, model.modules())):
        raise ValueError(
            f"{reason}, because its forward is not its class's own: torch.compile leaves it so. Compile the module's "
            f"model after the module is made, or use {all_layers}."
        )
    short = first_layers(model, anatomy.layers, layers)
    if short is None:
        raise ValueError(
            f"{reason}, because its configuration says more about its layers than how many there are. Use "
            f"{all_layers}, or another model."
        )
    # Shared by both.
    known = cast(dict[int, Anatomy], short.st_reba_anatomies)
    if layers not in known:
        try:
            found, states = probe(short)
            *_, calls = _noted(model, ATTENTION if anatomy.calls_our_attention else None)
        except CANNOT_RUN:
            calls = []
        left = next((call.gave for call in calls if call.path == anatomy.layers[layers - 1]), None)
        with torch.inference_mode():
            if left is None or not close(states, norm(left)):
                raise ValueError(f"{reason}: it then computes something else. Use {all_layers}.")
        known[layers] = found
    return short
