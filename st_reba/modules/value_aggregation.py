"""Value aggregation: what attention reads off the text, layer by layer, instead of where it ends up."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

import torch
from torch import nn

from ..lm import backbone
from ..lm.anatomy import output_projections
from ..lm.attention import setup
from ..lm.run import Halt, StatesAt
from ..settings import layers_or_all
from ..text.layout import Layout
from ..text.templates import preset
from .causal_module import CausalModule, PoolOver
from .token_vectors import TokenVectors, last_position

LAYERS = layers_or_all("layers")


class ValueAggregationModule(CausalModule):
    r"""The last token's attention outputs, averaged over layers (aligned weighted value aggregation).

    .. math:: e = \frac{1}{|\Lambda|} \sum_{l \in \Lambda} W_O^{(l)} \big[ \textstyle\sum_j A^{(l,h)}_{nj} v^{(l,h)}_j
        \big]_{h = 1, \dots, H}

    :math:`v_j` are the value vectors and :math:`A_{nj}` the weights with which the last token n attends to them, head
    by head; the output projection :math:`W_O` brings the heads into the space of the residual stream (its bias, where
    there is one, included). These are read where the model computes them anyway, in one pass and without attention
    maps; nothing above the last chosen layer's attention is run.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        layers: :math:`\Lambda`: ``"all"``, or the indices of the layers that count; negative ones from the top.
        template: Text with one ``{text}``, or a name in :data:`st_reba.TEMPLATES`: best a prompt at whose end the model
            is about to say what the text means. A name brings ``normalize_text``, too; see :class:`CausalTransformer`.
        pool_over: ``"all"``: n is the last token of the layout. ``"text"``: the last of the text. None: ``"all"``.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If a setting is out of range, or the model is not causal, or has no attention, or its output
            projections are not found.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "layers", "template"]
    no_words = "gives a text as a whole its vector, and its tokens none"
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

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        layers: Literal["all"] | Sequence[int] = "all",
        template: str = "prompteol",
        pool_over: PoolOver | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        LAYERS.check(layers)
        self.layers: Literal["all"] | list[int] = "all" if isinstance(layers, str) else list(layers)
        super().__init__(
            model_name_or_path,
            template=template,
            # Every layer is read: the output layer and final norm of the prompt's authors are not used.
            preset=replace(preset(template), output_layer=None, final_norm=None),
            pool_over="all" if pool_over is None else pool_over,
            rows="all",
            **transformer_kwargs,
        )
        self._projections = output_projections(self.model)
        self._aggregated = setup.resolve_layers(self.layers, self.model, self._projections)

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        position = last_position(self.selected(layout))
        projections = [self.model.get_submodule(self._projections[layer]) for layer in sorted(self._aggregated)]
        outputs = StatesAt(projections, "after", position, halts=True)
        with contextlib.suppress(Halt):
            self.run(layout, change=[outputs.as_change()], **kwargs)
        device = backbone.device(self.model)
        states = torch.stack([states.to(device) for states in outputs.states()], dim=1).mean(dim=1, keepdim=True)
        ids = layout.input_ids.gather(1, position[:, None]).to(device, non_blocking=True)
        return TokenVectors(states, torch.ones_like(ids, dtype=torch.bool), ids)
