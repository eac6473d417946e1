"""Refined Thought: read a text again, with a memory of the last time."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from transformers import DynamicCache

from ..lm.attention.hooks import MeanWeights
from ..lm.attention.kernels import weighted_sum, widen
from ..lm.passes import gather_positions, scatter_positions
from ..lm.prefixes import Past, cache_arguments
from ..settings import check, check_int
from ..text.layout import Layout
from .base import CausalModule, ModelSource
from .vectors import TokenVectors, zero_unselected


class RefinedThoughtModule(CausalModule):
    r"""The state of EOS after T passes, each of which reads the memory of the one before.

    .. math:: m = \sum_j \tfrac{1}{H} \sum_h A^{(L,h)}_{\mathrm{EOS},j} h_j

    with the attention A of the last layer L and the last hidden states h. The next pass reads m as an input embedding
    right before EOS. As attention is causal, the keys and values of the text never change: they are computed once, and
    each further pass is two tokens a text. T = 1 is the base model.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        iterations: Number of passes, T >= 1.
        tolerance: Cosine distance: a text whose embedding moved less stops there. None: all take T passes.
            ``encode(output_value=None)`` has the number of passes of each text, ``passes``.
        **settings: As for :class:`CausalModule`. Two passes or more need causal layers. ``pool_over`` is ``"all"``:
            from the text to EOS.
    """

    config_keys = [*CausalModule.config_keys, "iterations", "tolerance"]
    method = "Refined Thought"
    equation = (
        r"e = v^{(T)}_{\mathrm{EOS}}, \quad \text{pass } t+1 \text{ reads } "
        r"m_t = \sum_j \tfrac{1}{H} \sum_h A^{(L,h)}_{\mathrm{EOS},j} h_j \text{ before EOS}"
    )
    citation = "Refined Thought (新精炼思想): iterative sentence embeddings with an attention-guided memory token."
    cost = "One pass over the text, and passes of two tokens: little more than the classical embedding."
    has_token_vectors = False
    ends_in_eos = True
    fixed = {"pool_over": "all"}
    further_tokens = 1

    def __init__(
        self, model_name_or_path: ModelSource, *, iterations: int = 2, tolerance: float | None = None, **settings: Any
    ) -> None:
        advice = "give a whole number of passes from 1 to 1024; 1 is the base model."
        check_int("iterations", iterations, 1, 1024, advice)
        is_distance = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool) and 0 <= tolerance < 2
        advice = "give a cosine distance from 0 to 2, or None to take all passes."
        check("tolerance", tolerance, tolerance is None or is_distance, advice)
        super().__init__(model_name_or_path, **settings)
        self.iterations, self.tolerance = iterations, tolerance
        if iterations == 1:
            return
        advice = 'the embedding is the state of EOS, the last token. Use Pooling("lasttoken").'
        self.incompatible_poolings = dict.fromkeys({*Pooling.POOLING_MODES} - {"lasttoken"}, advice)
        [self._last] = self.lm.resolve([-1], "watched")
        if self.bidirectional_layers or not self.lm.continues_past:
            raise ValueError(
                f"iterations={iterations} with bidirectional_layers={self.bidirectional_layers} on "
                f"{type(self.model).__name__}: further passes continue the keys and values of the text, which needs "
                "causal layers. Use bidirectional_layers=0 and an architecture such as Llama, or iterations=1."
            )
        self.lm.check_takes_embeddings()

    @property
    def reads_prefix(self) -> bool:
        return self.iterations > 1 or super().reads_prefix

    def read(self, layout: Layout) -> TokenVectors:
        if self.iterations == 1:
            states = self.run(layout)
            passes = states.new_ones(len(states), dtype=torch.long)
        else:
            states, passes = self._refine(layout)
        return TokenVectors.pick(states, layout, self.selected(layout))._replace(extra={"passes": passes})

    def _refine(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return the states of the text, with that of EOS after its last pass, and the number of passes, (B,)."""
        cache, ends = DynamicCache(), layout.ends
        attended = MeanWeights(self._last, ends)
        h = self.run(layout, attended, **cache_arguments(self.model, cache))
        m = _weighted(zero_unselected(attended.weights, layout.attention_mask), h)
        end = TokenVectors.one_each(gather_positions(h, ends), layout, ends)
        thought, eos = end.states[:, 0], self.lm.embeddings(end.ids)
        passes = torch.ones_like(end.ids[:, 0])
        active = passes > 0
        two = torch.ones(len(ends), 2, dtype=torch.long)
        # The memory, and EOS anew, behind all tokens but EOS.
        pair = Layout(two, two.bool(), -two, past=Past(cache, ends))
        for _ in range(self.iterations - 1):
            attended = MeanWeights(self._last, torch.ones_like(ends))
            step = self.run(pair, attended, inputs_embeds=torch.cat([m[:, None].to(eos), eos], dim=1))
            cache.crop(-2)
            m = _weighted(attended.weights[:, :-2], h) + _weighted(attended.weights[:, -2:], step)
            moved = 1 - torch.cosine_similarity(widen(step[:, 1]), widen(thought))
            thought = torch.where(active[:, None], step[:, 1], thought)
            passes = passes + active
            if self.tolerance is not None:
                active = active & (moved >= self.tolerance)
                if not active.any():
                    break
        return scatter_positions(h, ends, thought), passes


def _weighted(weights: Tensor, states: Tensor) -> Tensor:
    """Sum states (B, N, D) with weights (B, N)."""
    return weighted_sum(weights[:, None], states)[:, 0]
