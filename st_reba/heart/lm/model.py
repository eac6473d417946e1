"""A causal language model: its parts, and one pass through it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..text.layout import Layout
from .attention import ATTENTION
from .passes import (
    Capture,
    Hook,
    Replace,
    Stop,
    active_pass,
    gather_positions,
    keep_hooks_for_checkpointing,
    scatter_positions,
)
from .prefixes import PastMask, run_prefix

_PROJECTIONS = (
    "self_attn.o_proj", "attn.c_proj", "attention.dense", "self_attn.out_proj", "self_attn.dense", "attn.out_proj",
    "self_attention.dense", "attn.attention.out_proj",
)  # fmt: skip
_FEED_FORWARD = ("mlp", "block_sparse_moe", "feed_forward", "ffn")

#: Configuration entries that list one value for each layer, besides those that have "layer" in their names.
_PER_LAYER = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "sliding_windows")

# Two texts with the same first token and the same last.
_TRIAL = ((0, 1, 2, 3), (0, 2, 1, 3))
_CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, KeyError)


class LanguageModel:
    """A causal language model whose passes can be watched and changed.

    It shares the weights of the model that is given, and has modules and a configuration of its own: that model stays
    as it is.

    Args:
        model: A decoder-only model without its head.
        output_layer: Layer after which to stop, counted from 1; None for the last.

    Attributes:
        model: The model, which ends after ``output_layer``.
        layers: Its layers.
        attention_layers: Indices of the layers whose attention hooks can act in.
        continues_past: Whether tokens behind a :class:`~st_reba.lm.prefixes.Past` are computed as in the whole text.

    Raises:
        ValueError: If the model is not causal.
    """

    def __init__(self, model: PreTrainedModel, output_layer: int | None = None) -> None:
        self.model = shallow_copy(model)
        self.layers = _layers(self.model)
        if output_layer is not None and output_layer < len(self.layers):
            _cut(self.model, self.layers, output_layer)
        self.attention_layers: tuple[int, ...] = ()
        self._probe()

    def run(self, layout: Layout, *hooks: Hook, **inputs: Any) -> Tensor:
        """Run the model once.

        Rows are padded on the right, so no mask is needed where attention is causal.

        Args:
            layout: B rows of N tokens.
            *hooks: What happens in the pass.
            **inputs: Arguments of the model's forward. ``inputs_embeds`` takes the place of the layout's tokens.

        Returns:
            Last hidden states, (B, N, D).
        """
        if "inputs_embeds" not in inputs:
            inputs["input_ids"] = layout.input_ids.to(self.device, non_blocking=True)
        if layout.past is not None:
            inputs |= layout.past.inputs(self.model, layout.input_ids.shape[1], self.device)
            hooks = (PastMask(layout.past.lengths), *hooks)
        if hooks and self.model.training and self.model.is_gradient_checkpointing:
            if any(hook.modules or hook.reads_weights for hook in hooks):
                raise ValueError(
                    "Gradient checkpointing runs each layer a second time, where states that are read or changed would "
                    f"be read or changed again. Call {type(self.model).__name__}.gradient_checkpointing_disable()."
                )
            keep_hooks_for_checkpointing(self.model)
        with active_pass(hooks):
            # transformers leaves hooks on a model that returns its hidden states, and these cannot be pickled.
            return cast(Tensor, self.model(**inputs, return_dict=True, output_hidden_states=False).last_hidden_state)

    def states_at(
        self,
        layout: Layout,
        modules: Sequence[nn.Module],
        side: Literal["before", "after"],
        positions: Tensor | None,
        *hooks: Hook,
        **inputs: Any,
    ) -> list[Tensor]:
        """Run the model until all of these modules were called, and return their states.

        Args:
            layout: B rows.
            modules: Modules of :attr:`model`.
            side: ``"before"`` for their inputs, ``"after"`` for their outputs.
            positions: (B,), the position of each row that is returned; None for all.
            *hooks: What happens in the pass.
            **inputs: As for :meth:`run`.

        Returns:
            For each module, (B, D), or (B, N, D) where all positions are returned.
        """
        capture = Capture(modules, side, positions, stops=True)
        with contextlib.suppress(Stop):
            self.run(layout, *hooks, capture, **inputs)
        return capture.states

    @property
    def device(self) -> torch.device:
        """Device of the model's input."""
        return self.model.device

    @property
    def embeddings(self) -> nn.Module:
        """Input embeddings."""
        return cast(nn.Module, self.model.get_input_embeddings())

    @property
    def positions(self) -> int | None:
        """Number of positions; None if the configuration names no limit."""
        config = self.model.config.get_text_config(decoder=True)
        found = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
        rotary = getattr(config, "rope_parameters", None) or {}
        if rotary.get("rope_type") == "longrope":
            # Beyond it, one long text changes how all texts of its batch are read.
            found.append(rotary.get("original_max_position_embeddings"))
        return min((limit for limit in found if isinstance(limit, int) and limit > 0), default=None)

    def check_ids(self, layout: Layout) -> None:
        """Raise if a token has no input embedding.

        Raises:
            ValueError: If there is one.
        """
        largest, known = int(layout.input_ids.max()), len(self.embeddings.weight)
        if largest >= known:
            raise ValueError(
                f"The tokenizer gives the id {largest}, and {type(self.model).__name__} has embeddings for {known} "
                "tokens: the two are of different models. Get both from one place, or resize the embeddings."
            )

    def projection(self, layer: int) -> nn.Module:
        """Return the output projection of a layer's attention.

        Raises:
            ValueError: If it is not found.
        """
        for name in _PROJECTIONS:
            with contextlib.suppress(AttributeError):
                return self.layers[layer].get_submodule(name)
        raise ValueError(
            f"The output projection of the attention in layer {layer} of {type(self.model).__name__} was not found. "
            "Use an architecture such as Llama, Qwen, Gemma or GPT-2."
        )

    def feed_forward_at(self, positions: Tensor, length: int) -> list[Hook]:
        """Return hooks with which the last layer's feed-forward part runs for one position of each row, (B,).

        Used where no other of the N states is read. Empty where the part is not found, or is more than a function of
        one state.
        """
        return self._feed_forward_at(positions, length) if self._skips_feed_forward else []

    def _feed_forward_at(self, positions: Tensor, length: int) -> list[Hook]:
        def fill(states: Tensor) -> Tensor:
            return scatter_positions(states.new_zeros(len(states), length, states.shape[-1]), positions, states[:, 0])

        parts = [part for part in (getattr(self.layers[-1], name, None) for name in _FEED_FORWARD) if part is not None]
        return [Replace(parts[:1], lambda states: gather_positions(states, positions)[:, None], fill)]

    def resolve(self, layers: Literal["all"] | Sequence[int], purpose: str) -> tuple[int, ...]:
        """Return indices of layers whose attention hooks can act in; negative ones count from the top.

        Args:
            layers: Indices, or ``"all"``.
            purpose: What the hooks do, for the error message, such as "watched".

        Raises:
            ValueError: If there is no such layer, or hooks cannot act in its attention.
        """
        count, name = len(self.layers), type(self.model).__name__
        given = range(count) if layers == "all" else layers
        if wrong := [layer for layer in given if type(layer) is not int or not -count <= layer < count]:
            raise ValueError(f"layers={layers!r}: {name} has {count} layers, use {-count} to {count - 1}, not {wrong}.")
        chosen = sorted({layer % count for layer in given})
        if layers == "all" and self.attention_layers:
            chosen = list(self.attention_layers)
        if missing := [layer for layer in chosen if layer not in self.attention_layers]:
            raise ValueError(
                f"The attention of {name} in layers {missing} does not call transformers' attention interface, so it "
                f"cannot be {purpose}. Use an architecture such as Llama, Qwen, Mistral, Gemma or GPT-2."
            )
        self.model.set_attn_implementation(ATTENTION)
        return tuple(chosen)

    def _probe(self) -> None:
        """Run the model on two short texts, plainly and with hooks, and note what hooks can do.

        The model keeps its attention implementation if that does not call ours, or if it was chosen for its speed.

        Raises:
            ValueError: If the model is not causal.
        """
        model, training, own, census = (
            self.model,
            self.model.training,
            self.model.config._attn_implementation,
            _Census(),
        )
        ids = torch.tensor(_TRIAL, device=self.device)

        def agrees(expected: Tensor, *hooks: Hook, **inputs: Any) -> bool:
            try:
                with torch.inference_mode(), active_pass(hooks):
                    return _close(model(**inputs).last_hidden_state[:, -expected.shape[1] :], expected)
            except _CANNOT_RUN:
                return False

        model.eval().set_attn_implementation("eager")
        with torch.inference_mode():
            expected = model(input_ids=ids).last_hidden_state
        if not _close(*expected[:, 0]):
            raise ValueError(
                f"In {type(model).__name__} a token sees later tokens: it is an encoder. Use a causal language model, "
                "such as Llama, Qwen, GPT-2 or Mistral."
            )
        model.set_attn_implementation(ATTENTION)
        self.attention_layers = tuple(sorted(census.seen)) if agrees(expected, census, input_ids=ids) else ()
        last = torch.tensor([3, 3])
        self._skips_feed_forward = agrees(expected[:, 3:], *self._feed_forward_at(last, 4), input_ids=ids)
        # PastMask knows windows, not chunks as in Llama 4.
        kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
        self.continues_past = False
        if self.attention_layers and "chunked_attention" not in kinds:
            with torch.inference_mode(), contextlib.suppress(*_CANNOT_RUN):
                past = run_prefix(model, ids[0, :1].tolist())
                inputs = {"input_ids": ids[:, 1:], **past.inputs(model, 3, self.device)}
                self.continues_past = agrees(expected[:, 1:], PastMask(past.lengths), **inputs)
        if not self.attention_layers or own not in ("eager", "sdpa", ATTENTION, None):
            self.continues_past = False
            model.set_attn_implementation(own)
        model.train(training)


class _Census(Hook):
    """Indices of the layers that call our attention."""

    layers = None

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def before_attention(self, call: Any) -> None:
        self.seen.add(call.layer)


def shallow_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules and configuration, and share its weights."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    for module in model.modules():
        # The dictionaries are shared too, so that what is moved or cast in one is in both.
        memo |= {id(own): own for own in (module._parameters, module._buffers)}
    return copy.deepcopy(model, memo)


def resolve_output_layer(depth: int, layer: int | float | None) -> int | None:
    """Return a layer counted from 1: from one counted from the top if negative, or from a share of the layers.

    Raises:
        ValueError: If there is no such layer.
    """
    if layer is None:
        return None
    if isinstance(layer, float) and 0 < layer <= 1:
        return max(1, round(layer * depth))
    if type(layer) is not int or layer == 0 or not -depth <= layer <= depth:
        raise ValueError(
            f"output_layer={layer!r}: the model has {depth} layers; give 1 to {depth}, or -{depth} to -1 from the top, "
            "or None for all."
        )
    return layer if layer > 0 else depth + 1 + layer


def depth(model: PreTrainedModel) -> int:
    """Return the number of layers."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth(model):
            return module
    raise ValueError(f"The layers of {type(model).__name__} were not found. Use another architecture.")


def _cut(model: PreTrainedModel, layers: nn.ModuleList, count: int) -> None:
    """Remove the layers above ``count``, and what the configuration lists for them."""
    config = model.config.get_text_config(decoder=True)
    for name, value in dict(vars(config)).items():
        if ("layer" in name or name in _PER_LAYER) and isinstance(value, list) and len(value) == len(layers):
            setattr(config, name, value[:count])
    config.num_hidden_layers = count
    del layers[count:]


def _close(states: Tensor, expected: Tensor) -> bool:
    """Return whether two results are equal but for rounding."""
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    return bool((states - expected).float().norm() <= tolerance * expected.float().norm())
