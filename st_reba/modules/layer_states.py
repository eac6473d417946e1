"""State of the last token after every layer, from one pass."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import nn

from ..lm.passes import Capture
from ..text.layout import Layout
from ..text.presets import preset
from .base import PoolOver
from .causal import CausalTransformer
from .vectors import TokenVectors, last_position


class LayerStates(CausalTransformer):
    r"""The last token's residual stream after every layer.

    .. math:: z_l = h^{(l)}_n, \quad l = 1, \dots, L

    where :math:`h^{(l)}` is the residual stream after layer l (FREEZE, section 3.2: "last token at each layer, after
    the residual connection"). That of the last layer is taken before the final norm, too. The input embeddings,
    :math:`h^{(0)}`, are not part of it.

    It adds ``layer_states`` (B, L, D) to the features, for :class:`LayerwiseAutoencoder`. The token embeddings are
    those of :class:`CausalTransformer`.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        template: Text with one ``{text}``, or the name of a template.
        pool_over: ``"text"`` for the last token of the text, ``"all"`` for that of the layout. None: ``"text"``, or as
            the template says.
        **settings: As for :class:`CausalModule`.
    """

    method = "Layer states"
    equation = r"z_l = h^{(l)}_n, \quad l = 1, \dots, L"
    citation = (
        "Hayden McDonald, Nicholas Marsano, Oliver McLaughlin: FREEZE! Pretrained Language Models as Frozen Feature "
        "Extractors for Semantic Tasks. 2024."
    )
    # The states are those of a whole text.
    has_token_vectors = False

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        template: str = "{text}",
        pool_over: PoolOver | None = None,
        **settings: Any,
    ) -> None:
        # Every layer is read, whatever output layer and norm the prompt's authors chose.
        known = replace(preset(template), output_layer=None, final_norm=None)
        super().__init__(model_name_or_path, template=known, pool_over=pool_over, **settings)

    @property
    def depth(self) -> int:
        """Number of layers, L."""
        return len(self.lm.layers)

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the saved settings. Version 0.1, which wrote no ``final_norm``, returned all tokens."""
        config: dict[str, Any] = super().load_config(*args, **kwargs)
        return {**config, "rows": "all"} if "rows" in config and "final_norm" not in config else config

    def read(self, layout: Layout) -> TokenVectors:
        selected = self.selected(layout)
        layers = Capture(self.lm.layers, "after", last_position(selected))
        tokens = TokenVectors.pick(self.run(layout, layers), layout, selected)
        states = torch.stack([state.to(tokens.states) for state in layers.states], dim=1)
        is_empty = layout.is_empty.to(states.device, non_blocking=True)
        return tokens._replace(extra={"layer_states": states.masked_fill(is_empty[:, None, None], 0)})
