"""A causal language model: its parts, and one pass through it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..settings import check_layers
from ..text.layout import Layout
from .attention.function import ATTENTION
from .parts import at_positions, continues_past, parts_of, shorten, takes_embeddings
from .passes import Capture, Hook, Side, Stop, active_pass, keep_hooks_for_checkpointing
from .prefixes import Past, PastMask, PrefixCache
from .views import depth, device_of, has_own_forward, set_attention, shallow_copy


class LanguageModel:
    """A causal language model whose passes can be watched and changed.

    It shares the weights of the model that is given, and has modules and a configuration of its own: that model stays
    as it is.

    Args:
        model: A decoder-only model without its head.
        output_layer: Layer after which to stop, counted from 1; None for the last.

    Attributes:
        model: The model, which ends after ``output_layer``.
        prefixes: Keys and values of the prefixes that were run last.

    Raises:
        ValueError: If the model is not causal, draws random numbers, or cannot end after ``output_layer``.
    """

    def __init__(self, model: PreTrainedModel, output_layer: int | None = None) -> None:
        # A copy of a model with another forward than its class's own would run the modules that it is copied from.
        self.model = model if any(map(has_own_forward, model.modules())) else shallow_copy(model)
        self.prefixes = PrefixCache()
        if getattr(model.config, "is_encoder_decoder", False) or not parts_of(self.model).is_causal:
            raise ValueError(
                f"In {type(model).__name__} a token sees later tokens: it is an encoder. Use a decoder-only (causal) "
                "language model, such as Llama, Qwen, GPT-2 or Mistral."
            )
        if parts_of(self.model).is_random:
            raise ValueError(
                f"{type(model).__name__} draws random numbers to read a long text, so its embedding would be another "
                "in each call. Use another decoder-only language model, such as Llama, Qwen, GPT-2 or Mistral."
            )
        if output_layer is not None:
            self.model = shorten(self.model, output_layer)
        parts = parts_of(self.model)
        if self.model.config._attn_implementation == "sdpa" and parts.needs_softmax and parts.calls_ours:
            # Some versions of transformers' own implementation drop a soft cap.
            set_attention(self.model, ATTENTION)

    def on(self, model: PreTrainedModel) -> Self:
        """Return the same for another object with the same modules, such as the compiled model."""
        other = copy.copy(self)
        other.model = model
        return other

    # One pass

    def run(self, layout: Layout, *hooks: Hook, final_norm: bool = True, **inputs: Any) -> Tensor:
        """Run the model once.

        Rows are padded on the right, so no mask is needed where attention is causal.

        Args:
            layout: B rows of N tokens.
            *hooks: What happens in the pass.
            final_norm: Whether the states go through the final norm.
            **inputs: Arguments of the model's forward. ``inputs_embeds`` takes the place of the layout's tokens.

        Returns:
            Last hidden states, (B, N, D).
        """
        if final_norm:
            return self._run(layout, *hooks, **inputs)
        [states] = self.states_at(layout, self.layers[-1:], "after", None, *hooks, **inputs)
        return states

    def run_layers(self, layout: Layout, *hooks: Hook, final_norm: bool = True, **inputs: Any) -> list[Tensor]:
        """Run the model once; return what enters the first layer, and what each layer returns, (B, N, D) each.

        Args:
            layout: As for :meth:`run`.
            *hooks: As for :meth:`run`.
            final_norm: Whether the states of the last layer go through the final norm. Those of others never do.
            **inputs: As for :meth:`run`.
        """
        entering, leaving = Capture(self.layers[:1], "before"), Capture(self.layers, "after")
        last = self._run(layout, *hooks, entering, leaving, **inputs)
        return [*entering.states, *leaving.states[:-1], last if final_norm else leaving.states[-1]]

    def _run(self, layout: Layout, *hooks: Hook, **inputs: Any) -> Tensor:
        if "inputs_embeds" not in inputs:
            inputs["input_ids"] = layout.input_ids.to(self.device, non_blocking=True)
        if layout.past is not None:
            past: Past = layout.past
            inputs |= past.inputs(self.model, layout.input_ids.shape[1], self.device)
            if (past.lengths != past.cache.get_seq_length()).any():
                # The model's own mask would not hide padding in the cache.
                hooks = (PastMask(past.lengths), *hooks)
        if hooks and self._is_checkpointing:
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
        side: Side,
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
            self._run(layout, *hooks, capture, **inputs)
        return capture.states

    @property
    def _is_checkpointing(self) -> bool:
        modules = self.model.modules() if self.model.training else ()
        return any(getattr(module, "gradient_checkpointing", False) for module in modules)

    # Parts

    @property
    def device(self) -> torch.device:
        """Device of the model's input."""
        return device_of(self.model)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers, in order.

        Raises:
            ValueError: If no layers were found that take and give states (B, N, D).
        """
        paths = parts_of(self.model).layers
        if not paths:
            raise ValueError(
                f"The layers of {type(self.model).__name__} were not found, or do not pass on one state for each "
                "token. Use another model."
            )
        # By path: an adapter may have replaced a module.
        return [self.model.get_submodule(path) for path in paths]

    @property
    def final_norm(self) -> nn.Sequential:
        """Modules between the last layer and the last hidden state: a norm, a projection, both or none.

        Raises:
            ValueError: If they are not all that the model does there.
        """
        paths = parts_of(self.model).norm
        if paths is None:
            raise ValueError(
                f"{type(self.model).__name__} changes its last layer's states in a way that could not be found, so "
                "earlier layers cannot be read alike. Use another model."
            )
        return nn.Sequential(*map(self.model.get_submodule, paths))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose attention hooks can act in."""
        parts = parts_of(self.model)
        return parts.attention_layers if parts.calls_ours else ()

    @property
    def embeddings(self) -> nn.Module:
        """Input embeddings."""
        return self.model.get_input_embeddings()

    @cached_property
    def positions(self) -> int | None:
        """Number of positions; None if the configuration names no limit."""
        config = self.model.config.get_text_config(decoder=True)
        # The second is MPT's name. xLSTM runs longer texts in parts, layer by layer.
        names = ("max_position_embeddings", "max_seq_len", "max_inference_chunksize")
        limits = [getattr(config, name, None) for name in names]
        rotary = getattr(config, "rope_parameters", None) or {}
        if rotary.get("rope_type") == "longrope":
            # Beyond it, one long text changes how all texts of its batch are read.
            limits.append(rotary.get("original_max_position_embeddings"))
        return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of values in a state after each layer, and in a last hidden state.

        Raises:
            ValueError: As for :attr:`layers`.
        """
        return parts_of(self.model).widths[: len(self.layers) + 1]

    @property
    def projected_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose attention has an output projection."""
        return tuple(parts_of(self.model).projections)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids with an input embedding."""
        return len(cast(Tensor, self.embeddings.weight))

    def check_ids(self, layout: Layout) -> None:
        """Raise if a token has no input embedding.

        Raises:
            ValueError: If there is one.
        """
        largest, known = int(layout.input_ids.max()), self.vocabulary_size
        if largest >= known:
            raise ValueError(
                f"The tokenizer gives the id {largest}, and {type(self.model).__name__} has embeddings for {known} "
                "tokens: the two are of different models. Get both from one place, or resize the embeddings."
            )

    def projection(self, layer: int) -> nn.Module:
        """Return the output projection of a layer's attention.

        It takes the weighted values of all heads side by side, and gives what the layer adds to the residual stream.

        Raises:
            ValueError: If it is not found.
        """
        parts = parts_of(self.model)
        layer = range(depth(self.model))[layer]
        if layer not in parts.projections:
            raise ValueError(
                f"The output projection of the attention in layer {layer} of {type(self.model).__name__} was not "
                "found. Use an architecture that has it as a module, such as Llama, Qwen or GPT-2."
            )
        return self.model.get_submodule(parts.projections[layer])

    def feed_forward_at(self, positions: Tensor | slice, length: int) -> list[Hook]:
        """Return hooks with which the last layer's feed-forward part runs for some of N positions alone.

        Use them where no other state is read. There are none if no part is a function of one state, or gradient
        checkpointing would run the part a second time without hooks.

        Args:
            positions: One position of each row, (B,), or a slice of all rows.
            length: N.
        """
        paths = parts_of(self.model).feed_forward
        if not paths or self._is_checkpointing:
            return []
        return [at_positions([*map(self.model.get_submodule, paths)], positions, length)]

    def resolve(self, layers: Literal["all"] | Sequence[int], purpose: str) -> tuple[int, ...]:
        """Return indices of layers whose attention hooks can act in, and set the model up for it.

        Args:
            layers: Indices, negative ones from the top, or ``"all"``.
            purpose: What the hooks do, for the error message, such as "watched".

        Raises:
            ValueError: If there is no such layer, or hooks cannot act in its attention.
        """
        check_layers("layers", layers)
        count, name = depth(self.model), type(self.model).__name__
        indices = range(count) if layers == "all" else layers
        if wrong := [layer for layer in indices if not -count <= layer < count]:
            raise ValueError(f"layers={layers!r}: {name} has {count} layers, use {-count} to {count - 1}, not {wrong}.")
        able = self.attention_layers
        chosen = [*able] if layers == "all" and able else sorted({layer % count for layer in indices})
        if missing := [layer for layer in chosen if layer not in able]:
            reason = f"is in layers {[*able]} alone"
            if not able:
                reason = "does not call transformers' attention interface, or gives it more than is known"
            raise ValueError(
                f"The attention of {name} in layers {missing} cannot be {purpose}: it {reason}. Use EchoModule or "
                "CausalTransformer, or an architecture such as Llama, Qwen, Mistral, Gemma or GPT-2."
            )
        set_attention(self.model, ATTENTION)
        return tuple(chosen)

    def resolve_both_ways(self, count: int) -> None:
        """Set the model up for ``count`` last layers that attend to later tokens too.

        Raises:
            ValueError: If hooks cannot act in their attention, or masks have a part in its scores.
        """
        self.resolve(range(-count, 0), "made to attend both ways")
        if parts_of(self.model).masks_weigh:
            raise ValueError(
                f"The masks of {type(self.model).__name__} add to the scores of the tokens that they show, and say "
                "nothing of later ones, so its layers cannot be made to attend both ways. Use another recipe."
            )

    def check_takes_embeddings(self) -> None:
        """Raise if a vector cannot take the place of a token.

        Raises:
            ValueError: If the model reads more of a token than its input embedding. Tried when it is first asked for.
        """
        if not takes_embeddings(self.model):
            raise ValueError(
                f"{type(self.model).__name__} reads more of a token than its input embedding, such as one for each "
                "layer, so no vector can take a token's place. Use another recipe, or another model."
            )

    # Prefixes

    @property
    def continues_past(self) -> bool:
        """Whether tokens behind a :class:`~st_reba.lm.prefixes.Past` are computed as in the whole text.

        Tried when it is first asked for. The model is then set up for it. Attention that was chosen for its speed, such
        as flash attention, stays.
        """
        attention = self.model.config._attn_implementation
        able = attention in (ATTENTION, "eager", "sdpa") and continues_past(self.model)
        if able and attention != ATTENTION:
            set_attention(self.model, ATTENTION)
        return able

    def behind_prefix(self, *layouts: Layout, least: int) -> list[Layout]:
        """Return layouts behind the tokens that precede every text, which are run once and kept.

        A layout stays as it is in training, where gradients are wanted, with an adapter, and where the model does not
        continue a past.

        Args:
            *layouts: Layouts of B rows.
            least: Length up to which a prefix is not worth it: the number of tokens that a tokenizer adds.
        """
        if self.model.training:
            self.prefixes.clear()
        # An adapter may be switched without a change of weights.
        if torch.is_grad_enabled() or self.model.training or hasattr(self.model, "peft_config"):
            return [*layouts]
        ids = [layout.shared_prefix for layout in layouts]
        long = [prefix for prefix in ids if len(prefix) > least]
        if not long or not self.continues_past:
            return [*layouts]
        pasts = dict(zip(long, self.prefixes.get(self.model, long), strict=True))
        return [
            replace(layout.columns(slice(len(prefix), None)), past=pasts[prefix]) if prefix in pasts else layout
            for layout, prefix in zip(layouts, ids, strict=True)
        ]


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
        problem = f"output_layer={layer!r}: the model has {depth} layers;"
        raise ValueError(f"{problem} give 1 to {depth}, or -{depth} to -1 from the top, or None for all.")
    return layer if layer > 0 else depth + 1 + layer
