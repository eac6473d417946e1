"""Parts of a model, found by running it on a few tokens.

No architecture is known by name: what modules took and gave in one pass says what they are. Trials run on copies that
are thrown away, so nothing has to be put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from .attention.function import ATTENTION
from .attention.kernels import without_autocast
from .passes import AttentionCall, Capture, Hook, Replace, Stop, active_pass, gather_positions, scatter_positions
from .prefixes import Past, PastMask, cache_arguments
from .views import (
    decoder_of,
    depth,
    device_of,
    first_layers,
    has_own_forward,
    is_multimodal,
    set_attention,
    shallow_copy,
    take_over,
    trial_copy,
)

#: Errors of a model that cannot be run in some way.
CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError)

#: Texts of the trials: two that share their first two tokens. The first ids may be padding, which some models hide.
TOKENS = ((5, 6, 7, 8), (5, 6, 9, 10))


@dataclass
class ModelParts:
    """Facts about a model. Paths are names of its modules.

    Attributes:
        is_causal: Whether no token sees later tokens.
        layers: Paths of the layers, in order; empty if no modules were found that take and give states (B, N, D).
        norm: Paths of the modules between the last layer and the last hidden state; None if these are not all.
        widths: Number of values in a state after each layer, and in a last hidden state.
        is_random: Whether states of longer texts depend on random numbers.
        attention_layers: Indices of the layers with attention.
        calls_ours: Whether their attention calls our function, and that gives what the model's own gives.
        needs_softmax: Whether the fused kernels have not the softmax of some layer, as with a soft cap or sinks.
        masks_weigh: Whether the mask of some layer adds to the scores of keys that it does not hide.
        projections: Paths of the output projection of the attention, by layer.
        feed_forward: Paths of the parts of the last layer that look at one position at a time.
        continues_past: Whether new tokens behind cached tokens get the states of the whole text; None until tried.
        takes_embeddings: Whether input embeddings are all that a model reads of tokens; None until tried.
    """

    is_causal: bool
    layers: tuple[str, ...]
    norm: tuple[str, ...] | None
    widths: tuple[int, ...]
    is_random: bool = False
    attention_layers: tuple[int, ...] = ()
    calls_ours: bool = False
    needs_softmax: bool = False
    masks_weigh: bool = False
    projections: Mapping[int, str] = field(default_factory=dict)
    feed_forward: tuple[str, ...] = ()
    continues_past: bool | None = None
    takes_embeddings: bool | None = None


class _Call(NamedTuple):
    """One call of a module: its path, its arguments, its first argument, and its first output."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    took: Any
    gave: Any


def _first(output: Any) -> Any:
    """Return the states of an output: some modules return a tuple that begins with them."""
    return output[0] if isinstance(output, tuple) else output


class _Census(Hook):
    """Record of the attention modules that call our function. Reads weights, as methods do."""

    layers = None

    def __init__(self) -> None:
        self.attentions: dict[int, nn.Module] = {}
        self.needs_softmax = self.masks_weigh = False

    def after_attention(self, call: AttentionCall, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        self.attentions[call.layer] = cast(nn.Module, call.module)
        self.needs_softmax |= call.softcap is not None or call.sinks is not None
        if call.mask is not None and call.mask.dtype != torch.bool:
            self.masks_weigh |= bool(((call.mask != 0) & (call.mask > torch.finfo(call.mask.dtype).min / 2)).any())
        return output, lse


def parts_of(model: PreTrainedModel) -> ModelParts:
    """Return the parts of a model, found once. Views of a model share them.

    Raises:
        ValueError: If the model cannot be run on token ids.
    """
    known = _known(model)
    if (count := depth(model)) not in known:
        known[count], _ = _probe(model)
    return known[count]


def _known(model: PreTrainedModel) -> dict[int, ModelParts]:
    """Return the parts that are known of a model and its views, by number of layers."""
    if not hasattr(model, "st_reba_parts"):
        model.st_reba_parts = {}  # type: ignore[assignment]
    return cast(dict[int, ModelParts], model.st_reba_parts)


def close(states: Tensor, expected: Tensor, times: float = 1) -> bool:
    """Return whether two results are equal but for rounding in the model's precision."""
    tolerance = times * torch.finfo(expected.dtype).eps ** 0.5
    return bool((states - expected).float().norm() <= tolerance * expected.float().norm())


def _run(trial: PreTrainedModel, *hooks: Hook, attention: str | None = None, **inputs: Any) -> Any:
    """Run a copy, on :data:`TOKENS` unless inputs are given, without the caller's hooks, gradients and autocast."""
    if attention is not None:
        set_attention(trial, attention)
    device = device_of(trial)
    if "input_ids" not in inputs and "inputs_embeds" not in inputs:
        inputs["input_ids"] = torch.tensor(TOKENS, device=device)
    with torch.inference_mode(), without_autocast(device), active_pass(hooks):
        # transformers leaves hooks on a model that returns its hidden states, and these cannot be pickled.
        return trial(return_dict=True, output_hidden_states=False, **inputs)


def _recorded(
    model: PreTrainedModel, *hooks: Hook, attention: str | None
) -> tuple[PreTrainedModel, Tensor, list[_Call]]:
    """Run a copy; return it, its last hidden states, and the calls of its modules in order of completion."""
    trial, calls = trial_copy(model), list[_Call]()

    def record(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(_Call(path, module, args, kwargs, next(iter((*args, *kwargs.values())), None), _first(output)))

    handles = [
        module.register_forward_hook(partial(record, path), with_kwargs=True) for path, module in trial.named_modules()
    ]
    states = _run(trial, *hooks, attention=attention).last_hidden_state
    for handle in handles:
        handle.remove()
    return trial, states, calls


def language_model_in(whole: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """Return a view of the language model in a multimodal model, and its path; any other model as it is, and "".

    It has to give the states that the whole gives for text, if the whole takes text alone. Else it is the whole.
    """
    if not is_multimodal(whole.config) or any(map(has_own_forward, whole.modules())):
        return whole, ""
    view = shallow_copy(whole)
    body: Any = view.base_model
    part = decoder_of(view)
    part = part if part is body or _reads_as(part, body) else body
    path = next(path for path, module in view.named_modules() if module is part)
    take_over(part, view, path)
    return part, path


def _reads_as(part: PreTrainedModel, whole: PreTrainedModel) -> bool:
    """Return whether a part of a model gives the same states for text, unless the whole gives none."""
    try:
        expected = _run(trial_copy(whole)).last_hidden_state
    except CANNOT_RUN:
        return True
    with contextlib.suppress(*CANNOT_RUN):
        return close(_run(trial_copy(part)).last_hidden_state, expected, times=2)
    return False


def _probe(model: PreTrainedModel) -> tuple[ModelParts, Tensor]:
    """Return the parts of a model, and its last hidden states on :data:`TOKENS`."""
    census = _Census()
    attention: str | None = ATTENTION
    try:
        trial, states, calls = _recorded(model, census, attention=attention)
        calls_ours = bool(census.attentions) and _is_own(states, model, census.needs_softmax)
    except CANNOT_RUN:
        calls_ours = False
    attentions: Mapping[int, nn.Module | None] = census.attentions
    if not calls_ours:
        attention = "eager" if model.config._attn_implementation == ATTENTION else None
        try:
            trial, states, calls = _recorded(model, attention=attention)
        except CANNOT_RUN as error:
            raise ValueError(
                f"{type(model).__name__} cannot be run on token ids alone ({type(error).__name__}: {error}). Use a "
                "decoder-only language model, such as Llama, Qwen, GPT-2 or Mistral."
            ) from error
        attentions = dict.fromkeys(_attending(model))
    if hasattr(model, "peft_config") and _mixes_texts(model, states, attention):
        raise ValueError(
            f"The adapter of {type(model).__name__} mixes the texts of a batch, so an embedding would depend on the "
            "others. Use an adapter that reads each text alone, such as LoRA."
        )
    first: dict[str, _Call] = {}
    for call in calls:
        # A module that is called several times is described by its first call.
        first.setdefault(call.path, call)
    layers = _layers(trial, first)
    inside = {index: module for index, module in attentions.items() if 0 <= index < depth(model)}
    projections = {index: _projection(layers[index], module, calls) for index, module in inside.items() if layers}
    parts = ModelParts(
        is_causal=close(*states[:, :2]),
        is_random=not calls_ours and bool(attentions) and _draws_random_numbers(model, attention),
        attention_layers=tuple(sorted(inside)),
        calls_ours=calls_ours,
        needs_softmax=census.needs_softmax,
        masks_weigh=census.masks_weigh,
        layers=layers,
        norm=_norm(layers[-1], calls, states) if layers else None,
        projections={index: path for index, path in projections.items() if path is not None},
        feed_forward=_feed_forward(first[layers[-1]], calls) if layers else (),
        widths=(*(first[layer].gave.shape[-1] for layer in layers), states.shape[-1]),
    )
    return parts, states


def _is_own(states: Tensor, model: PreTrainedModel, needs_softmax: bool) -> bool:
    """Return whether states are those of the model's own attention."""
    # The same kernels first: in half precision, another rounding chooses other experts.
    for name in ("eager",) if needs_softmax else ("sdpa", "eager"):
        with contextlib.suppress(*CANNOT_RUN):
            return close(states, _run(trial_copy(model), attention=name).last_hidden_state, times=2)
    return False


def _mixes_texts(model: PreTrainedModel, states: Tensor, attention: str | None) -> bool:
    """Return whether the states of a text depend on the others of its batch, as Lily's do."""
    first = torch.tensor(TOKENS[:1], device=device_of(model))
    alone = _run(trial_copy(model), attention=attention, input_ids=first).last_hidden_state
    return not close(alone, states[:1], times=2)


def _draws_random_numbers(model: PreTrainedModel, attention: str | None) -> bool:
    """Return whether a model draws random numbers for longer texts, as Reformer does to choose keys."""
    device = device_of(model)
    generator: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    before = generator.get_rng_state()
    with contextlib.suppress(*CANNOT_RUN):
        _run(trial_copy(model), attention=attention, input_ids=torch.full((1, 96), TOKENS[0][0], device=device))
    return not torch.equal(generator.get_rng_state(), before)


def _attending(model: PreTrainedModel) -> list[int]:
    """Return the layers whose attention maps a model returns itself."""
    try:
        output = _run(trial_copy(model), attention="eager", output_attentions=True)
    except CANNOT_RUN:
        return []
    return [index for index, weights in enumerate(output.get("attentions") or ()) if weights is not None]


def _layers(trial: PreTrainedModel, calls: Mapping[str, _Call]) -> tuple[str, ...]:
    """Return the outermost list that is as long as the model is deep, of modules that took and gave states in order."""
    order = {path: number for number, path in enumerate(calls)}
    for path, module in trial.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth(trial):
            layers = tuple(f"{path}.{index}" for index in range(len(module)))
            places = [order[layer] for layer in layers if layer in order]
            is_in_order = len(places) == len(layers) and places == sorted(places)
            if is_in_order and all(_keeps_states(calls[layer]) for layer in layers):
                return layers
    return ()


def _keeps_states(call: _Call) -> bool:
    """Return whether a module took and gave one state for each token."""
    shape = (len(TOKENS), len(TOKENS[0]))
    return all(
        isinstance(states, Tensor) and states.dim() == 3 and states.shape[:2] == shape
        for states in (call.took, call.gave)
    )


def _norm(last: str, calls: Sequence[_Call], wanted: Tensor) -> tuple[str, ...] | None:
    """Return the siblings of the layers' list that lead from the last layer's states to the last hidden state."""
    owner = _parent(_parent(last))
    steps: list[str] = []
    states = None
    for call in calls:
        if call.path == last:
            steps, states = [], call.gave
        elif _parent(call.path) == owner and _same(call.took, states):
            steps.append(call.path)
            states = call.gave
    return tuple(steps) if _same(states, wanted) else None


def _projection(layer: str, attention: nn.Module | None, calls: Sequence[_Call]) -> str | None:
    """Return the last module with weights that is called within the attention, unless it takes the attention's input.

    An attention of the model's own has the layer's number, by which it reads a cache: of several such modules, one
    within the other, the innermost ends first.
    """
    # Selected by path first: a model has hundreds of modules.
    of_layer = [call for call in calls if call.path.startswith(f"{layer}.")]
    for call in of_layer:
        is_numbered = hasattr(call.module, "layer_idx") or hasattr(call.module, "layer_id")
        if call.module is attention or (attention is None and is_numbered):
            inside = [part for part in of_layer if part.path.startswith(f"{call.path}.") and _has_weights(part.module)]
            # Experts take the states of some tokens, not (B, N, D). Where the projection is a sibling of the attention,
            # the last module within makes the values.
            if not inside or not _keeps_states(inside[-1]) or not isinstance(call.gave, Tensor):
                return None
            last = inside[-1]
            is_projection = last.gave.shape == call.gave.shape and not _same(last.took, call.took)
            return last.path if is_projection else None
    return None


def _feed_forward(layer: _Call, calls: Sequence[_Call]) -> tuple[str, ...]:
    """Return the parts of a layer that make of one state alone what they made of it among others."""
    paths = []
    for call in list(calls):
        is_part = _parent(call.path) == layer.path and _has_weights(call.module)
        if is_part and all(isinstance(states, Tensor) and states.dim() == 3 for states in (call.took, call.gave)):
            # Not the second token: the one before may be a padding token, whose embedding is zero.
            with contextlib.suppress(*CANNOT_RUN), torch.inference_mode(), without_autocast(call.took.device):
                alone = _first(call.module(call.took[:1, 2:3]))
                if alone.shape == call.gave[:1, 2:3].shape and close(alone, call.gave[:1, 2:3]):
                    paths.append(call.path)
    modules = [call.module for call in calls if call.path in paths]
    last = torch.tensor([3, 3])
    with contextlib.suppress(*CANNOT_RUN), torch.inference_mode(), without_autocast(layer.gave.device):
        with active_pass([at_positions(modules, last, 4)]):
            again = _first(layer.module(*layer.args, **layer.kwargs))
        if close(again[:, 3], layer.gave[:, 3]):
            return tuple(paths)
    return ()


def at_positions(modules: Sequence[nn.Module], positions: Tensor | slice, length: int) -> Hook:
    """Return a hook with which modules run for some of N positions: one of each row, (B,), or a slice of all rows.

    Other outputs are zero.
    """

    def pick(states: Tensor) -> Tensor:
        if isinstance(positions, slice):
            return states[:, positions].contiguous()
        return gather_positions(states, positions)[:, None]

    def fill(states: Tensor) -> Tensor:
        filled = states.new_zeros(len(states), length, states.shape[-1])
        if isinstance(positions, Tensor):
            return scatter_positions(filled, positions, states[:, 0])
        filled[:, positions] = states
        return filled

    return Replace(modules, pick, fill)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _has_weights(module: nn.Module) -> bool:
    """Return whether a module has a matrix. Quantised ones may be buffers; those of a norm have one dimension."""
    return any(weight.dim() > 1 for weight in (*module.parameters(), *module.buffers()))


def _same(value: Any, wanted: Any) -> bool:
    """Return whether both are the same states, to the bit."""
    if not isinstance(value, Tensor) or not isinstance(wanted, Tensor):
        return False
    return value.dtype == wanted.dtype and value.device == wanted.device and torch.equal(value, wanted)


def continues_past(model: PreTrainedModel) -> bool:
    """Return whether new tokens behind cached tokens get the states that they have in the whole text; tried once.

    In the trial, the new tokens are behind rows of unequal lengths, at positions of their own.
    """
    parts = parts_of(model)
    if parts.continues_past is None:
        parts.continues_past = parts.calls_ours and _continues_past(model)
    return parts.continues_past


def _continues_past(model: PreTrainedModel) -> bool:
    trial, cache = trial_copy(model), DynamicCache()
    _shorten_reach(trial)
    device = device_of(trial)
    ids, lengths = torch.tensor(TOKENS, device=device), torch.tensor([2, 1])
    positions = (lengths[:, None] + torch.arange(2)).to(device)
    try:
        expected = _run(trial, attention=ATTENTION).last_hidden_state
        _run(trial, input_ids=ids[:, :2], **cache_arguments(trial, cache))
        inputs = Past(cache, lengths).inputs(trial, 2, device)
        states = _run(trial, PastMask(lengths), input_ids=ids.gather(1, positions), **inputs).last_hidden_state
    except CANNOT_RUN:
        return False
    behind = positions.to(expected.device)[..., None].expand(-1, -1, expected.shape[2])
    return close(states, expected.gather(1, behind), times=2)


def _shorten_reach(trial: PreTrainedModel) -> None:
    """Let tokens see no further than the texts of the trials show: one token back, or within chunks of two.

    PastMask has no chunks, and windows alone that attention is told, as Phi-3.5-MoE's is not.
    """
    config = trial.config.get_text_config(decoder=True)
    for name in ("sliding_window", "attention_chunk_size"):
        reach = getattr(config, name, None)
        if isinstance(reach, int):
            for owner in (config, *trial.modules()):
                length = vars(owner).get(name)
                # ModernBERT's modules count one more.
                if isinstance(length, int):
                    setattr(owner, name, length - reach + 2)


def takes_embeddings(model: PreTrainedModel) -> bool:
    """Return whether input embeddings are all that a model reads of tokens; tried once.

    Some models have embeddings for each layer, too, and look tokens up by their embeddings, or leave those out.
    """
    parts = parts_of(model)
    if parts.takes_embeddings is None:
        trial = trial_copy(model)
        try:
            expected = _run(trial, attention=ATTENTION if parts.calls_ours else None).last_hidden_state
            with torch.inference_mode():
                embeddings = trial.get_input_embeddings()(torch.tensor(TOKENS, device=device_of(trial)))
                # No token has these.
                embeddings = embeddings * (1 + 4 * torch.finfo(embeddings.dtype).eps)
            states = _run(trial, inputs_embeds=embeddings).last_hidden_state
            parts.takes_embeddings = close(states, expected, times=2)
        except CANNOT_RUN:
            parts.takes_embeddings = False
    return parts.takes_embeddings


def shorten(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return a view of a model that ends after ``count`` layers and in the same norm. The model stays as it is.

    Raises:
        ValueError: If the architecture cannot be shortened, or accelerate has placed the model.
    """
    if count == depth(model):
        return model
    refusal = f"{type(model).__name__} cannot be shortened to {count} layers"
    all_layers = "output_layer=-1, all layers"
    parts = parts_of(model)
    short = None
    if hasattr(model, "_hf_hook"):
        reason = "accelerate has placed it on its devices. Load it without device_map"
    elif any(map(has_own_forward, model.modules())):
        reason = "its forward is not its class's own: torch.compile leaves it so. Compile the module's model afterwards"
    else:
        reason = "its layers were not found, or its configuration lists more about them. Use another model"
        if parts.norm is not None:
            short = first_layers(model, parts.layers, count)
    if short is None:
        raise ValueError(f"{refusal}, because {reason}, or use {all_layers}.")
    known = _known(short)
    if count not in known:
        try:
            shorter, states = _probe(short)
            agrees = close(states, _expected(model, parts, count), times=2)
        except CANNOT_RUN:
            agrees = False
        if not agrees:
            raise ValueError(f"{refusal}: it then computes something else. Use {all_layers}.")
        known[count] = shorter
    return short


def _expected(model: PreTrainedModel, parts: ModelParts, count: int) -> Tensor:
    """Return the last hidden states that the model should have if it ended after ``count`` layers."""
    trial = trial_copy(model)
    capture = Capture([trial.get_submodule(parts.layers[count - 1])], stops=True)
    with contextlib.suppress(Stop):
        _run(trial, _Census(), capture, attention=ATTENTION if parts.calls_ours else None)
    [states] = capture.states
    with torch.inference_mode(), without_autocast(states.device):
        for path in cast(tuple[str, ...], parts.norm):
            states = trial.get_submodule(path)(states)
    return states
