"""The last token's state behind every layer, out of one pass."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import nn

from ..lm.anatomy import layer_paths
from ..lm.run import StatesAt
from ..text.layout import Layout
from ..text.templates import preset
from .causal_module import PoolOver
from .causal_transformer import CausalTransformer
from .token_vectors import TokenVectors, last_of, last_position, picked


class LayerStates(CausalTransformer):
    r"""A causal model that hands on its last token's residual stream behind every layer.

    .. math:: z_l = h^{(l)}_n, \quad l = 1, \dots, L

    where :math:`h^{(l)}` is what layer l leaves in the residual stream (FREEZE, section 3.2: "last token at each layer,
    after the residual connection"): raw, **before** the final norm, for the last layer too, of which transformers hands
    out the normalised state alone. The input embeddings, :math:`h^{(0)}`, are not among them.

    Adds ``layer_states`` (B, L, D) to the features, for :class:`LayerwiseAutoencoder`. The token embeddings are those
    of :class:`CausalTransformer`, so that ST's ``Pooling`` means what it means there. One pass gives all of it, and of
    each layer nothing is kept but one vector a text.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        template: Text with one ``{text}``, or a name in :data:`st_reba.TEMPLATES`; see :class:`CausalTransformer`.
        pool_over: Whose last token is read: ``"text"`` (the text's own) or ``"all"`` (the layout's); see
            :class:`CausalModule`. None: ``"text"``, or as the template's name says.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If the template has another number of slots, the model is not causal, or its layers cannot be read.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    method = "Layer states"
    equation = r"z_l = h^{(l)}_n, \quad l = 1, \dots, L"
    citation = (
        "Hayden McDonald, Nicholas Marsano, Oliver McLaughlin: FREEZE! Pretrained Language Models as Frozen Feature "
        "Extractors for Semantic Tasks. 2024."
    )
    no_chunks = (
        "gives a text as a whole its states of each layer: a chunk has none. Encode each chunk as a text of its own, "
        "or use another recipe."
    )

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        template: str = "{text}",
        pool_over: PoolOver | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        # Every layer is read: the output layer and final norm of the prompt's authors are not used.
        known = replace(preset(template), output_layer=None, final_norm=None)
        super().__init__(model_name_or_path, template=template, preset=known, pool_over=pool_over, **transformer_kwargs)
        #: L, the number of layers.
        self.depth = len(layer_paths(self.model))

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The settings that were saved. Version 0.1, which wrote no ``final_norm``, handed on all tokens whatever."""
        config = super().load_config(*args, **kwargs)
        return {**config, "rows": "all"} if "rows" in config and "final_norm" not in config else config

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        selected = self.selected(layout)
        tokens = StatesAt([self.layer(index) for index in range(self.depth)], "after", last_position(selected))
        states = self.run(layout, change=[tokens.as_change()], **kwargs)
        layers = torch.stack([token.to(states.device) for token in tokens.states()], dim=1)
        empty = (layout.text_lengths == 0).to(layers.device, non_blocking=True)
        layers = layers.masked_fill(empty[:, None, None], 0)
        reading = picked(states, layout.input_ids, last_of(selected) if self.rows == "last" else selected)
        return reading._replace(extra={"layer_states": layers})
