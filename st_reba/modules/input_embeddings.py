"""Input embeddings alone: a control without context."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ..lm.passes import Hook
from ..text.layout import Layout
from .causal import CausalTransformer


class InputEmbeddings(CausalTransformer):
    r"""Word i is the input embedding of token i, without any context.

    A score means little without this control: with small decoders, the mean of the input embeddings is better than many
    a contextual recipe.
    """

    method = "Bag of input embeddings"
    equation = r"e_i = E[w_i], \quad i = 1, \dots, n"
    cost = "One look-up per token: next to nothing compared to the classical embedding."
    reads_prefix = True

    def run(self, layout: Layout, *hooks: Hook, **inputs: Any) -> Tensor:
        return cast(Tensor, self.lm.embeddings(layout.input_ids.to(self.lm.device, non_blocking=True)))
