"""Refined Thought: think about the text again, with a memory of the last time."""

from __future__ import annotations

import warnings
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache

from ..lm import backbone
from ..lm.attention.changes import BehindPrefix
from ..lm.attention.observers import MeanWeights
from ..lm.attention.setup import make_cacheable, watched_last_layer
from ..lm.backbone import for_summing, weighted_sum
from ..lm.run import PassChange, at, put
from ..settings import Setting, choice, whole
from ..text.layout import NOT_TEXT, Layout
from ..text.templates import Template
from .causal_module import CausalModule, PoolOver
from .token_vectors import TokenVectors, picked

# The arguments of forward that each further pass sets itself.
OWN = (
    "attention_mask", "cache", "cache_position", "input_ids", "inputs_embeds", "past_key_values", "position_ids",
    "use_cache",
)  # fmt: skip

# The upper end is far above what helps: a configuration that asks for more is a mistake or an attack.
ITERATIONS = whole("iterations", 1, 1024, "give a whole number of passes from 1 to 1024; 1 is the base model.")
TOLERANCE: Setting[float | None] = Setting(
    "tolerance",
    lambda value: value is None or (isinstance(value, (int, float)) and 0 <= value < 2),
    "give a cosine distance from 0 to 2, or None to take all passes.",
)
IN_EOS: Setting[PoolOver] = choice("pool_over", "all", says='refined thought is in EOS, behind the text; use "all".')


class RefinedThoughtModule(CausalModule):
    r"""RT with T passes over a text that ends in EOS.

    Pass 1 is the base model. The memory of a pass is

    .. math:: m = \sum_j \tfrac{1}{H} \sum_h A^{(L,h)}_{\mathrm{EOS},j} \, h_j

    with the last layer's attention A and the last hidden states h. The next pass reads m, as an input embedding, right
    before EOS (positions 0 .. n+1), in place of the memory before it. The embedding is EOS's last hidden state of the
    last pass: use ``Pooling("lasttoken")``. T = 1 is the base model.

    As attention is causal, the text's keys and values never change: they are computed once, and each further pass is
    two tokens a text.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        iterations: T >= 1.
        tolerance: A text whose embedding moved less than this in a pass, in cosine distance, stops there; None: all
            take T passes. ``encode(output_value=None)`` says under ``passes`` how many each text took.
        pool_over: ``"all"``: from the text to EOS.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If a setting is out of range, the tokenizer has no EOS, the model is not causal, or its attention
            cannot be watched.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "iterations", "tolerance"]
    no_words = "gives a text as a whole its vector, and its tokens none"
    method = "Refined Thought"
    equation = (
        r"e = v^{(T)}_{\mathrm{EOS}}, \quad \text{pass } t+1 \text{ reads } "
        r"m_t = \sum_j \tfrac{1}{H} \sum_h A^{(L,h)}_{\mathrm{EOS},j} h_j \text{ before EOS}"
    )
    unfit_poolings = dict.fromkeys(
        sorted(set(Pooling.POOLING_MODES) - {"lasttoken"}),
        "the passes refine the state of EOS, the last token, which is the embedding, and this reads others, too. "
        'Use Pooling("lasttoken").',
    )
    citation = "Refined Thought (新精炼思想): iterative sentence embeddings with an attention-guided memory token."

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        iterations: int = 2,
        tolerance: float | None = None,
        pool_over: PoolOver = "all",
        **transformer_kwargs: Any,
    ) -> None:
        self.iterations = ITERATIONS.check(iterations)
        self.tolerance = TOLERANCE.check(tolerance)
        if iterations == 1:
            # It is the base model, and any pooling will do.
            self.unfit_poolings = {}
        super().__init__(model_name_or_path, pool_over=IN_EOS.check(pool_over), **transformer_kwargs)
        self._reuses_cache = False
        if iterations == 1:
            return
        self._last_layer = watched_last_layer(self.model, "iterations=1")
        # Where tokens see what follows, the text's own states change with the memory.
        if not self.bidirectional_layers:
            self._reuses_cache = make_cacheable(self.model)
            if not self._reuses_cache:
                warnings.warn(
                    f"The cache of {type(self.model).__name__} cannot be reused, so every pass runs over the whole "
                    "text. The numbers are the same; it takes more time.",
                    stacklevel=2,
                )

    @property
    def cost(self) -> str:
        if self.iterations == 1:
            return super().cost
        if not self._reuses_cache:
            return f"{self.iterations} passes over the text: about {self.iterations} times the classical embedding."
        further = "1 pass" if self.iterations == 2 else f"{self.iterations - 1} passes"
        return (
            f"One pass over the text and {further} of two tokens over its cached keys and values: little more than "
            "the classical embedding."
        )

    @property
    def reads_behind_prefixes(self) -> bool:
        """Only where it is the base model: a memory is of all tokens, and further passes have a cache of their own."""
        return self.iterations == 1 and super().reads_behind_prefixes

    def layouts(self) -> list[Template]:
        return [replace(self._template, end=True)]

    def _positions(self) -> int | None:
        positions = super()._positions()
        return positions if positions is None or self.iterations == 1 else positions - 1

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        if self.iterations == 1:
            states = self.run(layout, **kwargs)
            passes = torch.ones(len(states), dtype=torch.long, device=states.device)
        else:
            unfit = sorted(name for name, value in kwargs.items() if name in OWN or isinstance(value, Tensor))
            if unfit:
                raise ValueError(
                    f"forward was given {', '.join(unfit)}: with iterations={self.iterations} each pass reads other "
                    "tokens, at positions and with a cache of its own. Leave it out, or use iterations=1."
                )
            states, passes = self._passes(layout, **kwargs)
        vectors = picked(states, layout.input_ids, self.selected(layout))
        return vectors._replace(extra={"passes": passes})

    def _passes(self, layout: Layout, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """States (B, N, D) with EOS's of its last pass, and how many passes each text took, (B,)."""
        # This cache keeps every key, whatever a layer's window; the mask hides what lies outside of it.
        cache = DynamicCache() if self._reuses_cache else None
        states, memory = self._whole_pass(layout, cache=cache, **kwargs)
        thought = _Thought(at(states, layout.ends), self.tolerance)
        for _ in range(self.iterations - 1):
            if thought.has_settled:
                break
            if cache is not None:
                embedding, memory = self._short_pass(layout, states, memory, cache, **kwargs)
            else:
                refined, memory = self._whole_pass(_with_room(layout), memory, **kwargs)
                # The text's own states change where tokens see what follows, until the text has settled.
                states = torch.where(thought.active[:, None, None], refined[:, :-1], states)
                embedding = at(refined, layout.ends + 1)
            thought.refine(embedding)
        return put(states, layout.ends, thought.embedding), thought.passes

    def _short_pass(
        self, layout: Layout, states: Tensor, memory: Tensor, cache: DynamicCache, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """EOS's state and the memory, (B, D) each, of a pass over the memory of the last one and EOS alone.

        Args:
            layout: B texts.
            states: (B, N, D), of the pass over the whole text.
            memory: (B, D), that of the last pass.
            cache: The keys and values of the pass over the whole text.
            **kwargs: For the backbone's forward.
        """
        eos_ids, device = layout.input_ids.gather(1, layout.ends[:, None]), backbone.device(self.model)
        eos_ids, last = (part.to(device, non_blocking=True) for part in (eos_ids, layout.ends))
        eos = self.model.get_input_embeddings()(eos_ids)[:, 0]
        inputs = {
            "inputs_embeds": torch.stack([memory.to(eos.dtype), eos], dim=1),
            "position_ids": torch.stack([last, last + 1], dim=1),
            **backbone.keeping(self.model, cache),
        }
        both = torch.ones(len(last), 2, dtype=torch.long)
        pair = Layout(both, both.bool(), NOT_TEXT * both, seen=layout.seen)
        weights = MeanWeights(torch.ones_like(last), self._last_layer)
        behind = PassChange(masking=BehindPrefix(last, new=2))
        step = self.run(pair, inputs=lambda: inputs, change=[behind], observe=weights, **kwargs)
        cache.crop(-2)
        # Behind a text's own prefix the weights are 0.
        found = weights.result()
        return step[:, 1], _weighted(found[:, :-2], states) + _weighted(found[:, -2:], step)

    def _whole_pass(
        self, layout: Layout, memory: Tensor | None = None, cache: DynamicCache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """States (B, N, D) and memory (B, D) of a pass over the whole text.

        Args:
            layout: B texts.
            memory: (B, D), which the pass reads right before EOS; None: there is none yet.
            cache: The pass fills it with keys and values; None: they are not kept.
            **kwargs: For the backbone's forward.
        """
        device = backbone.device(self.model)
        ids, real, last = (
            part.to(device, non_blocking=True) for part in (layout.input_ids, layout.attention_mask, layout.ends)
        )

        def inputs() -> dict[str, Any]:
            embeddings = self.model.get_input_embeddings()(ids)
            if memory is not None:
                embeddings = put(embeddings, last - 1, memory)
            return {"inputs_embeds": embeddings, **backbone.keeping(self.model, cache)}

        weights = MeanWeights(last, self._last_layer)
        states = self.run(layout, inputs=inputs, observe=weights, **kwargs)
        return states, _weighted(weights.result() * real, states)


def _with_room(layout: Layout) -> Layout:
    """The same with one more token, whose id means nothing, right before EOS."""
    end = layout.ends[:, None]
    return replace(
        layout,
        input_ids=pad(layout.input_ids, (0, 1)).scatter(1, end + 1, layout.input_ids.gather(1, end)),
        attention_mask=pad(layout.attention_mask, (0, 1)).scatter(1, end + 1, True),
        copy_index=pad(layout.copy_index, (0, 1), value=NOT_TEXT),
    )


class _Thought:
    """EOS's state of each text, (B, D), while it is refined."""

    def __init__(self, embedding: Tensor, tolerance: float | None) -> None:
        self.embedding = embedding
        self.tolerance = tolerance
        self.active = torch.ones(len(embedding), dtype=torch.bool, device=embedding.device)
        self.passes = torch.ones(len(embedding), dtype=torch.long, device=embedding.device)

    @property
    def has_settled(self) -> bool:
        """Whether all texts have. Without a tolerance none does, and the accelerator is not waited for."""
        return self.tolerance is not None and not bool(self.active.any())

    def refine(self, embedding: Tensor) -> None:
        """Take the state of one more pass, for the texts that have not settled."""
        new, old = for_summing(embedding), for_summing(self.embedding)
        moved = (1 - torch.cosine_similarity(new, old)).clamp(min=0)
        self.embedding = torch.where(self.active[:, None], embedding, self.embedding)
        self.passes = self.passes + self.active
        if self.tolerance is not None:
            self.active = self.active & (moved >= self.tolerance)


def _weighted(weights: Tensor, states: Tensor) -> Tensor:
    """sum_j weights_j states_j: (B, N) and (B, N, D) to (B, D), float32 or float64."""
    return weighted_sum(weights[:, None], states)[:, 0]
