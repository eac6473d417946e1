"""Value aggregation: what attention reads off a text, layer by layer.

Yeqin Zhang, Yunfei Wang, Jiaxuan Chen, Ke Qin, Yizheng Zhao, Cam-Tu Nguyen: LLM-based Embeddings: Attention Values
Encode Sentence Semantics Better Than Hidden States. arXiv:2602.01572, 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from sentence_transformers.base.modules import Transformer

from st_reba.text.templates import preset

from ..settings import first_not_none
from ..text.layout import Layout
from .base import CausalModule, PoolOver
from .vectors import TokenVectors, last_position


class ValueAggregationModule(CausalModule):
    r"""The last token's attention outputs, averaged over layers.

    .. math:: e = \frac{1}{|\Lambda|} \sum_{l \in \Lambda} W_O^{(l)} \big[ \textstyle\sum_j A^{(l,h)}_{nj} v^{(l,h)}_j
        \big]_{h = 1, \dots, H}

    The model runs up to the last of these layers.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        layers: Layers that count: ``"all"``, or indices, negative ones from the top.
        template: Text with one slot, or a name.
        pool_over: ``"all"``: n is the last token of the layout. ``"text"``: that of the text. None: ``"all"``.
        **settings: As for :class:`CausalModule`.
    """

    config_keys = [*CausalModule.config_keys, "layers", "template"]
    equation = r"e = \frac{1}{|\Lambda|} \sum_{l} W_O^{(l)} [ \sum_j A^{(l,h)}_{nj} v^{(l,h)}_j ]_h"
    has_token_vectors = False

    def __init__(
        self,
        model_name_or_path: str | Transformer,
        *,
        layers: Literal["all"] | Sequence[int] = "all",
        template: str = "prompteol",
        pool_over: PoolOver | None = None,
        output_layer: int | None = None,
        **settings: Any,
    ) -> None:
        # Every layer is read, whatever output layer the prompt's authors chose.
        settings["normalize_text"] = first_not_none(settings.get("normalize_text"), preset(template).normalize_text)
        settings = {
            **settings,
            "rows": "all",
            "output_layer": output_layer,
            "pool_over": first_not_none(pool_over, "all"),
        }
        super().__init__(model_name_or_path, template=preset(template).template, **settings)
        self.layers = layers
        self._projections = [self.lm.projection(layer) for layer in self.lm.resolve(layers, "read")]

    def read(self, layout: Layout) -> TokenVectors:
        positions = last_position(self.selected(layout))
        outputs = self.states_at(layout, self._projections, "after", positions)
        mean = torch.stack([own.to(outputs[0].device) for own in outputs]).mean(dim=0)
        return TokenVectors.one_each(mean, layout, positions)
