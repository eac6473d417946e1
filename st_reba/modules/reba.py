"""ReBA: early tokens look back from the repetition through the model's own attention.

Retrieval Backward Attention without Additional Training: Enhance Embeddings of Large Language Models via Repetition.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..lm.attention.hooks import RunningMaximum
from ..lm.attention.kernels import weighted_sum
from ..settings import Layers, check_flag, check_layers
from ..text.layout import Layout
from .base import CausalModule, ModelSource
from .echo import check_repetitions
from .vectors import TokenVectors, zero_unselected


class ReBAModule(CausalModule):
    r"""Word i is a sum over all tokens from i on, of a text that is repeated k times.

    .. math:: e_i = \sum_{j=i}^{kn} a_{ij} v_j, \quad a_{ij} = \max_{\text{layers, heads}} \tfrac{1}{2}(A_{ij} + A_{ji})

    with the last hidden states v and the attention A of each head (Eqs. 4 to 6 and Algorithms 1 to 3 of the paper). As
    A is lower triangular, :math:`a_{ij}` is half of max :math:`A_{ji}` off the diagonal and max :math:`A_{ii}` on it.
    No map is stored: the maximum runs along with the pass.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        repetitions: Number of copies, k >= 1.
        layers: Layers whose attention counts: ``"all"``, or indices, negative ones from the top. ``[-1]`` is the
            ablation of the paper's appendix A.1.3.
        normalize_weights: Whether the weights of each word are divided by their sum. The paper does not. The authors'
            code first sums the rows of a word, which is the same for a word of one token.
        **settings: As for :class:`CausalModule`. ``rows="last"`` computes :math:`e_n` alone. ``pool_over`` is
            ``"text"``: other tokens have no vectors.
    """

    config_keys = [*CausalModule.config_keys, "repetitions", "layers", "rows", "normalize_weights"]
    method = "ReBA"
    equation = (
        r"e_i = \sum_{j=i}^{kn} a_{ij} v_j, \quad "
        r"a_{ij} = \max_{\text{layers, heads}} \tfrac{1}{2}(A_{ij} + A_{ji}), \quad i = 1, \dots, n"
    )
    citation = (
        "Retrieval Backward Attention without Additional Training: "
        "Enhance Embeddings of Large Language Models via Repetition."
    )
    incompatible_poolings = {"cls": 'it returns e_1 alone. Use Pooling("mean") or Pooling("lasttoken").'}
    repeats_text = True
    fixed = {"pool_over": "text"}
    # Maxima, weights and two steps between them, in float32.
    BYTES_PER_PAIR = 16

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        repetitions: int = 2,
        layers: Layers = "all",
        normalize_weights: bool = False,
        **settings: Any,
    ) -> None:
        template = "{text}" * check_repetitions(repetitions, 1)
        check_layers("layers", layers)
        check_flag("normalize_weights", normalize_weights)
        super().__init__(model_name_or_path, template=template, **{"tokenization": "pieces", **settings})
        self.repetitions, self.normalize_weights = repetitions, normalize_weights
        self.layers: Literal["all"] | list[int] = layers if layers == "all" else list(layers)
        self._watched = self.lm.resolve(layers, "watched")

    def read(self, layout: Layout) -> TokenVectors:
        words, text = self.selected(layout), layout.copy_index >= 0
        columns = words.any(dim=0).nonzero().flatten().tolist() or [0]
        start = columns[0]
        keys = slice(start, columns[-1] + 1)
        attended = RunningMaximum(keys, slice(start, words.shape[1]), self._watched)
        # No state before the first word that is asked for is read.
        behind = self.lm.feed_forward_at(slice(start, None), words.shape[1]) if start else []
        v = self.run(layout, attended, *behind)[:, start:]
        a = zero_unselected(attended.symmetrised(), text[:, start:])
        if self.normalize_weights:
            a = a / a.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(a.dtype).tiny)
        return TokenVectors.pick(weighted_sum(a, v).to(v), layout.columns(keys), words[:, keys])
