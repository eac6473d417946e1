"""What a loaded language model can do, found by asking it.

Architectures are not recognised by name: a model is run on four tokens, and what it did is what it can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention.function import NAME
from .attention.masks import attending_both_ways
from .attention.observers import LayerCensus, Observer, watching
from .attention.rerouting import Rerouting, rerouted
from .attention.weights import MapSource
from .precision import without_autocast

#: Memory that the maps of one micro-batch may take where an architecture must hand them all out, in bytes.
MAP_BUDGET = 2**28


@dataclass(frozen=True)
class AttentionRoute:
    """How the attention of a backbone is watched.

    Attributes:
        layers: Indices of the layers that have attention.
        through_function: Whether they call our attention function; else the architecture hands out its maps.
    """

    layers: tuple[int, ...]
    through_function: bool


def depth(model: PreTrainedModel) -> int:
    """Number of layers."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Number of token ids that have an input embedding."""
    return len(cast(nn.Embedding, model.get_input_embeddings()).weight)


def positions(model: PreTrainedModel) -> int | None:
    """How many positions the model has, or None if its configuration names no limit.

    Beyond the length it was first trained on, a model with long-range rotary embeddings (LongRoPE, as in Phi-3-128k)
    reads every token of a batch otherwise as soon as one text is that long. An embedding would depend on its batch, so
    that length is the limit.
    """
    config = model.config.get_text_config(decoder=True)
    # The second is MPT's name for it.
    found = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") == "longrope":
        found.append(rotary.get("original_max_position_embeddings"))
    return min((limit for limit in found if isinstance(limit, int) and limit > 0), default=None)


def device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its input.

    That is where its first parameter is, unless accelerate has placed the model: what is offloaded is nowhere.
    """
    placed = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return model.device if placed is None else torch.device(placed)


def is_checkpointing(model: PreTrainedModel) -> bool:
    """Whether a backward pass through the model would run its layers a second time."""
    return model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def check_it_can_be_saved(model: PreTrainedModel) -> None:
    """Refuse weights that transformers would not know how to write.

    Raises:
        ValueError: For a model that torchao's ``quantize_`` changed after it was loaded. One that transformers
            quantised on loading has a quantizer, which knows.
    """
    quantized = any(type(parameter.data).__module__.startswith("torchao") for parameter in model.parameters())
    if quantized and getattr(model, "hf_quantizer", None) is None:
        raise ValueError(
            f"{type(model).__name__} was quantised after it was loaded, and its configuration does not say how, so it "
            "cannot be saved. Quantise it on loading instead: "
            'model_kwargs={"quantization_config": TorchAoConfig(...)}, with TorchAoConfig from transformers.'
        )


def prepare(model: PreTrainedModel) -> None:
    """Refuse a backbone whose first token sees the second, and make sure that its attention is its own.

    Asked for a soft cap (Gemma 2), transformers' ``sdpa`` drops it silently in some versions; there our attention
    function, which honours it, takes the place of ``sdpa``.

    Raises:
        ValueError: For encoders, encoder-decoders, and decoders whose configuration turned the causal mask off.
    """
    name = type(model).__name__
    advice = "st_reba needs a decoder-only (causal) language model, such as Llama, Qwen, GPT-2 or Mistral."
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder. {advice}")
    fused = model.config._attn_implementation == "sdpa"
    census = LayerCensus()
    if fused:
        _set_attention(model, NAME)
    with watching(census):
        states = _trial_states(model)
    if fused and not census.explicit:
        _set_attention(model, "sdpa")
    # The two rows of the trial share their first token and differ in the second.
    first, other = states[:, 0]
    if not close(first, other):
        raise ValueError(f"In {name} the first token's state changes with the second token: it is an encoder. {advice}")


def attention_route(model: PreTrainedModel) -> AttentionRoute:
    """Find out how this model's attention can be watched, and set it up for that.

    Raises:
        ValueError: If it has no attention at all (a state-space model).
    """
    expected = _trial_states(model)
    if layers := _through_function(model, expected):
        return AttentionRoute(layers, through_function=True)

    _set_attention(model, "eager")
    # Falcon reads this name at every call, yet does not let the public method set it.
    model.config._attn_implementation = "eager"
    output = _trial_output(model, output_attentions=True)
    maps = output.get("attentions") or ()
    layers = tuple(index for index, weights in enumerate(maps) if weights is not None)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention to look back with, so ReBA cannot run on it. "
            "Use a model with attention layers, or EchoModule."
        )
    if not close(output.last_hidden_state, expected):
        raise ValueError(
            f"{type(model).__name__} computes other hidden states when it hands out its attention maps than when it "
            "does not (Falcon with ALiBi does so in some versions of transformers), so the maps cannot be trusted and "
            "ReBA cannot run on it. Use EchoModule, or another version of transformers."
        )
    return AttentionRoute(layers, through_function=False)


def _through_function(model: PreTrainedModel, expected: Tensor) -> tuple[int, ...]:
    """Give a model our attention function: the layers that call it; none where its states then differ."""
    # A name in the configuration is not yet a call of the function: BLOOM and Falcon have code of their own.
    _set_attention(model, NAME)
    census = LayerCensus()
    with watching(census):
        states = _trial_states(model)
    return tuple(census.layers) if not census.unknown or close(states, expected) else ()


def make_maskable(model: PreTrainedModel) -> bool:
    """Set a model up for all layers' masks to be replaced; False, and the model as it was, where they cannot be."""
    original = model.config._attn_implementation
    if len(_through_function(model, _trial_states(model))) == depth(model):
        return True
    _set_attention(model, original)
    return False


def attention_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Indices of the layers that have attention, in whatever code; the model stays as it is."""
    original = model.config._attn_implementation
    _set_attention(model, NAME)
    census = LayerCensus()
    try:
        with watching(census):
            _trial_states(model)
        if census.layers:
            return tuple(census.layers)
        model.config._attn_implementation = "eager"
        maps = _trial_output(model, output_attentions=True).get("attentions") or ()
        return tuple(index for index, weights in enumerate(maps) if weights is not None)
    finally:
        _set_attention(model, original)
        model.config._attn_implementation = original


def make_bidirectional(model: PreTrainedModel, count: int) -> frozenset[int]:
    """Set a model up for its last ``count`` layers to attend both ways, and make sure that they can.

    Returns:
        The indices of those layers.

    Raises:
        ValueError: If the model has fewer layers, or one of them has no attention that can be turned.
    """
    if count == 0:
        return frozenset()
    layers = frozenset(range(depth(model) - count, depth(model)))
    name = type(model).__name__
    if count > depth(model):
        raise ValueError(f"bidirectional_layers={count}: {name} has {depth(model)} layers; use 0 to {depth(model)}.")
    original = model.config._attn_implementation
    _set_attention(model, NAME)
    census = LayerCensus()
    with watching(census), attending_both_ways(layers, torch.ones(2, 2, dtype=torch.bool, device=device(model))):
        first, other = _trial_states(model)[:, 0]
    # Equal to the bit, because the effect of one layer may be smaller than what half precision rounds.
    if not layers <= set(census.layers) or torch.equal(first, other):
        _set_attention(model, original)
        raise ValueError(
            f"bidirectional_layers={count}: the last layers of {name} cannot be made to attend both ways, because they "
            "do not call transformers' attention interface. Use bidirectional_layers=0, or an architecture that does, "
            "such as Llama, Qwen, Mistral, Gemma or GPT-2."
        )
    return layers


def make_rerouted(model: PreTrainedModel, layers: Collection[int]) -> None:
    """Set a model up for a token's key and value to be re-routed in these layers, and make sure that they can.

    Raises:
        ValueError: If the attention of one of them cannot be reached.
    """
    expected = _trial_states(model)
    original = model.config._attn_implementation
    _set_attention(model, NAME)
    census = LayerCensus()
    with watching(census):
        plain = _trial_states(model)
    with rerouted(Rerouting(layers, torch.ones(2, dtype=torch.long, device=device(model)))):
        first, other = _trial_states(model)[:, 0]
    strange = bool(census.unknown) and not close(plain, expected)
    # To the bit, as above: the first token's state now knows of the second.
    if strange or not set(layers) <= set(census.layers) or torch.equal(first, other):
        _set_attention(model, original)
        raise ValueError(
            f"The keys and values of layers {sorted(layers)} of {type(model).__name__} cannot be re-routed, because "
            "these layers do not call transformers' attention interface. Use CausalTransformer with the same template, "
            "or an architecture that does, such as Llama, Qwen, Mistral, Gemma or GPT-2."
        )


def run_and_show_maps(model: PreTrainedModel, input_ids: Tensor, observer: Observer, **kwargs: Any) -> Tensor:
    """Run a backbone that hands out its maps, and show them to an observer.

    Args:
        model: A backbone whose route is not ``through_function``.
        input_ids: (B, N), no more texts than :func:`micro_batch` says.
        observer: Shown each layer's map that it wants.
        **kwargs: For the backbone's forward.

    Returns:
        Last hidden states (B, N, D).
    """
    given = {**kwargs, **without_hidden_states(model)}
    output = model(**{**given, "input_ids": input_ids, "output_attentions": True, "return_dict": True})
    for layer, weights in enumerate(output.attentions):
        if weights is not None and observer.wants(layer):
            observer.observe(MapSource(layer, weights))
    return output.last_hidden_state


def micro_batch(model: PreTrainedModel, length: int) -> int:
    """How many texts of ``length`` tokens have attention maps within :data:`MAP_BUDGET`, all together; at least 1."""
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    return max(1, MAP_BUDGET // (depth(model) * heads * length**2 * model.dtype.itemsize))


def _trial_output(model: PreTrainedModel, **kwargs: bool) -> Any:
    """Two rows of two tokens that differ in the second, without dropout."""
    input_ids = torch.tensor([[0, 1], [0, 2]], device=device(model))
    with dry_run(model):
        return model(input_ids=input_ids, return_dict=True, **without_hidden_states(model), **kwargs)


def _trial_states(model: PreTrainedModel) -> Tensor:
    return _trial_output(model).last_hidden_state


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Ask for an attention implementation, without the log line that answers where an architecture cannot follow."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        model.set_attn_implementation(name)
    finally:
        logger.setLevel(level)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model in this block as for inference, then leave each of its modules in the mode that it was in.

    ``train()`` would put all of them in one mode: a layer that was frozen by ``eval()`` would drop out again.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def dry_run(model: Any) -> Iterator[None]:
    """Try a model out in this block, and leave it as it was.

    Without dropout, gradients and autocast, whose rounding would look like another result.
    """
    with in_eval_mode(model), torch.inference_mode(), without_autocast(device(model)):
        yield


def without_hidden_states(model: PreTrainedModel) -> dict[str, bool]:
    """What to pass to a model so that it does not hand out its hidden states, though its configuration asks for them.

    transformers would leave hooks on it that cannot be pickled. Empty where nothing need be passed.
    """
    return {"output_hidden_states": False} if hidden_states_are_asked_for(model) else {}


def hidden_states_are_asked_for(model: PreTrainedModel) -> bool:
    """Whether the configuration asks for the states of every layer."""
    return bool(getattr(model.config, "output_hidden_states", False))


def gives_the_same(model: PreTrainedModel, trial: Callable[[], tuple[Tensor, Tensor]]) -> bool:
    """Whether a cheap way to run a model gives what is expected; not so where it cannot be run.

    Args:
        model: It is tried in inference, and left as it was.
        trial: Gives the states of the cheap way, and those expected.
    """
    try:
        with dry_run(model):
            found, expected = trial()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
        return False
    return close(found, expected)


def close(states: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding in the model's own precision."""
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    return bool((states - expected).float().norm() <= tolerance * expected.float().norm())
