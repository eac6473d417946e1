"""What the last token attends to: states that it weighs, and values that it reads, layer by layer."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..lm.attention.hooks import MeanWeights
from ..lm.attention.kernels import weighted_sum
from ..lm.views import depth
from ..settings import Layers, check, check_layers
from ..text.layout import Layout
from .base import CausalModule, ModelSource
from .causal import CausalTransformer
from .vectors import TokenVectors, last_position, zero_unselected


class AttentionPoolingModule(CausalTransformer):
    r"""A mean of the tokens' states, weighted by the last token's attention in the last layer.

    .. math:: e = \frac{\sum_j a_j v_j}{\sum_j a_j}, \quad a_j = \frac{1}{H} \sum_h A^{(L,h)}_{nj}

    The sums run over the tokens that ``pool_over`` names, and n is the last of them.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        **settings: As for :class:`CausalModule`.
    """

    method = "Attention pooling"
    equation = r"e = \frac{\sum_j a_j v_j}{\sum_j a_j}, \quad a_j = \frac{1}{H} \sum_h A^{(L,h)}_{nj}"
    has_token_vectors = False

    def __init__(self, model_name_or_path: ModelSource, **settings: Any) -> None:
        super().__init__(model_name_or_path, **settings)
        [self._last] = self.lm.resolve([-1], "watched")

    def read(self, layout: Layout) -> TokenVectors:
        selected = self.selected(layout, every=True)
        n = last_position(selected)
        attended = MeanWeights(self._last, n)
        v = self.run(layout, attended)
        a = zero_unselected(attended.weights, selected)
        a = a / a.sum(dim=1, keepdim=True).clamp(min=torch.finfo(a.dtype).tiny)
        return TokenVectors.one_each(weighted_sum(a[:, None], v)[:, 0].to(v), layout, n)


class ValueAggregationModule(CausalModule):
    r"""The last token's attention outputs, averaged over layers (aligned weighted value aggregation).

    .. math:: e = \frac{1}{|\Lambda|} \sum_{l \in \Lambda} W_O^{(l)} \big[ \textstyle\sum_j A^{(l,h)}_{nj} v^{(l,h)}_j
        \big]_{h = 1, \dots, H}

    The output projection :math:`W_O` includes its bias. The model runs up to the last of these layers' attention.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        layers: Layers that count, :math:`\Lambda`: ``"all"``, or indices, negative ones from the top.
        template: Text with one slot, or a name.
        **settings: As for :class:`CausalModule`. ``pool_over`` is ``"all"`` by default: n is the last token of the
            layout. ``"text"``: that of the text.
    """

    config_keys = [*CausalModule.config_keys, "layers", "template"]
    method = "Value aggregation"
    equation = (
        r"e = \frac{1}{|\Lambda|} \sum_{l \in \Lambda} W_O^{(l)} "
        r"\big[ \sum_j A^{(l,h)}_{nj} v^{(l,h)}_j \big]_{h = 1, \dots, H}"
    )
    citation = (
        "Yeqin Zhang, Yunfei Wang, Jiaxuan Chen, Ke Qin, Yizheng Zhao, Cam-Tu Nguyen: LLM-based Embeddings: Attention "
        "Values Encode Sentence Semantics Better Than Hidden States. arXiv:2602.01572, 2026."
    )
    cost = "One pass over the text, up to the last layer that counts: no more than the classical embedding."
    has_token_vectors = False
    defaults = {"pool_over": "all"}
    reads_all_layers = True

    def __init__(
        self, model_name_or_path: ModelSource, *, layers: Layers = "all", template: str = "prompteol", **settings: Any
    ) -> None:
        check_layers("layers", layers)
        super().__init__(model_name_or_path, template=template, **settings)
        self.layers: Literal["all"] | list[int] = layers if layers == "all" else list(layers)
        count = depth(self.model)
        is_within = layers == "all" or all(-count <= layer < count for layer in layers)
        check("layers", layers, is_within, f"the model has {count} layers; use {-count} to {count - 1}.")
        chosen = self.lm.projected_layers if layers == "all" else sorted({layer % count for layer in layers})
        for layer in chosen or [-1]:
            # Raises where there is no projection.
            self.lm.projection(layer)
        self._read_layers = list(chosen)

    def read(self, layout: Layout) -> TokenVectors:
        n = last_position(self.selected(layout))
        projections = [self.lm.projection(layer) for layer in self._read_layers]
        outputs = self.lm.states_at(layout, projections, "after", n, *self.own_hooks(layout))
        e = torch.stack([output.to(outputs[0]) for output in outputs]).mean(dim=0)
        return TokenVectors.one_each(e, layout, n)
