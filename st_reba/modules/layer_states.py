"""State of the last token after every layer, from one pass."""

from __future__ import annotations

from typing import Any

import torch

from ..lm.passes import Capture
from ..text.layout import Layout
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
        **settings: As for :class:`CausalModule`. ``pool_over`` is ``"text"`` for the last token of the text, ``"all"``
            for that of the layout.
    """

    method = "Layer states"
    equation = r"z_l = h^{(l)}_n, \quad l = 1, \dots, L"
    citation = (
        "Hayden McDonald, Nicholas Marsano, Oliver McLaughlin: FREEZE! Pretrained Language Models as Frozen Feature "
        "Extractors for Semantic Tasks. 2024."
    )
    # The states are those of a whole text.
    has_token_vectors = False
    reads_all_layers = True

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
