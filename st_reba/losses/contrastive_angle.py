"""The sum of a contrastive loss and AnglE's angle loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import AnglELoss, MultipleNegativesRankingLoss
from sentence_transformers.util import all_gather_with_grad
from torch import Tensor, nn


class ContrastiveAngleLoss(nn.Module):
    r"""In-batch and hard negatives, and differences of angles in complex space, each with its weight.

    .. math:: L = w_c L_{contrastive} + w_a \log\Bigl(1 + \sum_{i, j} e^{s\,(\theta(h_j, h_j^-) - \theta(h_i, h_i^+))}
        \Bigr)

    The first term is BeLLM's Equation 6, ST's :class:`MultipleNegativesRankingLoss`; the second AnglE's (Li and Li,
    2024), ST's :class:`AnglELoss`, over the pairs that triplets are made of: every positive pair shall be nearer than
    every negative one. BeLLM's released training command has :math:`w_c = 20, w_a = 1, s = 20`.

    Args:
        model: The model that is trained.
        temperature: :math:`\tau` of the contrastive term.
        contrastive_weight: :math:`w_c`.
        angle_weight: :math:`w_a`.
        angle_scale: :math:`s`.
        gather_across_devices: Whether the rows of all devices are one batch.

    Inputs: triplets of texts; no labels.

    Raises:
        ValueError: If the weights are not numbers of 0 or more, one of them greater.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        temperature: float = 0.05,
        contrastive_weight: float = 1.0,
        angle_weight: float = 1.0,
        angle_scale: float = 20.0,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        weights = {"contrastive": contrastive_weight, "angle": angle_weight}
        if not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
            raise ValueError(f"The weights {weights}: give numbers of 0 or more, at least one of them greater than 0.")
        self.model = model
        self.weights = weights
        self.gather_across_devices = gather_across_devices
        # They are given embeddings: a model of their own would stand in the state of this loss once more.
        none: Any = None
        self.contrastive = MultipleNegativesRankingLoss(none, scale=1 / temperature)
        self.angle = AnglELoss(none, scale=angle_scale)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> dict[str, Tensor]:
        """The weighted terms of a batch of triplets, scalars, which ST's trainer sums and logs one by one.

        Raises:
            ValueError: If there are not three columns.
        """
        embeddings = [self.model(column)["sentence_embedding"] for column in sentence_features]
        return self.compute_loss_from_embeddings(embeddings)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> dict[str, Tensor]:
        """The same from (B, D) embeddings of anchors, positives and negatives."""
        if len(embeddings) != 3:
            raise ValueError(f"{len(embeddings)} columns of texts were given: it takes triplets, which have three.")
        if self.gather_across_devices:
            # Each device then has the loss of all rows, and of its gradient the part of its own.
            embeddings = [all_gather_with_grad(part) for part in embeddings]
        terms = {}
        if self.weights["contrastive"]:
            terms["contrastive"] = self.contrastive.compute_loss_from_embeddings(embeddings, cast(Tensor, None))
        if self.weights["angle"]:
            anchors, positives, negatives = embeddings
            pairs = [torch.cat([anchors, anchors]), torch.cat([positives, negatives])]
            alike = torch.ones(len(anchors), dtype=anchors.dtype, device=anchors.device)
            terms["angle"] = self.angle.compute_loss_from_embeddings(pairs, torch.cat([alike, 0 * alike]))
        return {name: self.weights[name] * term for name, term in terms.items()}

    def get_config_dict(self) -> dict[str, Any]:
        """For the model card."""
        return {
            "scale": self.contrastive.scale,
            "angle_scale": self.angle.scale,
            **{f"{name}_weight": weight for name, weight in self.weights.items()},
            "gather_across_devices": self.gather_across_devices,
        }

    @property
    def citation(self) -> str:
        """For the model card."""
        return str(self.angle.citation)
