"""What FREEZE's autoencoders are pretrained with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from ..modules.trained.layerwise_autoencoder import LayerwiseAutoencoder


class ReconstructionLoss(nn.Module):
    r"""How far each layer's decoded state is from the state, with its mean and variance normalised.

    .. math:: \mathcal{L} = \frac{1}{L B D} \sum_l \sum_b \lVert g_l(f_l(z_{bl})) - \mathrm{norm}(z_{bl}) \rVert^2

    (FREEZE, section 4.2.3.) The layers share no weights, so each learns as if it were alone.

    Args:
        model: A model that ends in :class:`st_reba.modules.LayerwiseAutoencoder`, with decoders.

    Inputs: one column of texts, or several; labels are not looked at.

    Raises:
        ValueError: If the model ends in another module, or has no decoders.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        last = model[-1]
        if not isinstance(last, LayerwiseAutoencoder) or not last.decoders:
            raise ValueError(
                f"The model ends in {type(last).__name__}, which has no decoders: reconstruction is learnt by a "
                "LayerwiseAutoencoder with decoders=True."
            )
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch of texts."""
        states = torch.cat([self._states(column) for column in sentence_features])
        autoencoder: Any = getattr(self.model, "module", self.model)[-1]
        return autoencoder.reconstruction_errors(states).mean()

    def _states(self, column: dict[str, Any]) -> Tensor:
        # Of texts whose states are at hand, the embedding is not needed.
        return column["layer_states"] if "layer_states" in column else self.model(column)["layer_states"]
