"""JTCSE's loss: its terms, and their sum."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from ..modules import TwinTower
from .info_nce import InfoNCELoss
from .interaction import InteractionInfoNCELoss
from .tensor_modulus import TensorModulusLoss

_READ = ("cls_states", "pooler_outputs", "cross_states")


class JTCSELoss(nn.Module):
    r"""The sum of JTCSE's three terms, each with its weight (Equation 15), for a :class:`st_reba.modules.TwinTower`.

    .. math::
        L = \sum_{i \in \{I, II\}} L_{NCE}(h_i, h_i^+) + L_{ICNCE} + L_{ICTM}

    A row of the data is one text, which runs through each tower twice: dropout makes two views of it. With two texts a
    row, such as a sentence and its round-trip translation, these are the views. A weight of 0 leaves its term out, as
    in the paper's ablations (Table X).

    Args:
        model: Its first module is a ``TwinTower``.
        temperature: :math:`\tau` of both contrastive terms.
        info_nce_weight: Of InfoNCE within each tower: :class:`InfoNCELoss`.
        interaction_weight: Of InfoNCE across the towers, on their own states and on the cross-attention streams:
            :class:`InteractionInfoNCELoss`.
        modulus_weight: Of the tensor modulus constraint: :class:`TensorModulusLoss`.
        least_cosine: As in :class:`TensorModulusLoss`.
        seed: Of the coin in :class:`InteractionInfoNCELoss`.

    Raises:
        ValueError: If the model has no twin tower, or the weights are not numbers of 0 or more, one of them greater.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        temperature: float = 0.05,
        info_nce_weight: float = 1.0,
        interaction_weight: float = 1.0,
        modulus_weight: float = 1.0,
        least_cosine: float = 1e-4,
        seed: int = 42,
    ) -> None:
        super().__init__()
        if not isinstance(model[0], TwinTower):
            raise ValueError(
                f"JTCSELoss compares two towers, and the model's first module is {type(model[0]).__name__}: "
                "use a TwinTower."
            )
        weights = {"info_nce": info_nce_weight, "interaction": interaction_weight, "modulus": modulus_weight}
        if not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
            raise ValueError(
                f"The weights {weights}: give numbers of 0 or more, at least one of them greater than 0; 1 is the "
                "paper's."
            )
        self.model = model
        self.weights = weights
        self.info_nce = InfoNCELoss(temperature)
        self.interaction = InteractionInfoNCELoss(temperature, seed)
        self.modulus = TensorModulusLoss(least_cosine)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> dict[str, Tensor]:
        """The weighted terms of a batch, scalars, which ST's trainer sums and logs one by one.

        Args:
            sentence_features: One column of texts, or two.
            labels: Unused.

        Raises:
            ValueError: If there are more columns.
        """
        first, second = self._views(list(sentence_features))
        states, pooled = (
            (first["cls_states"], second["cls_states"]),
            (first["pooler_outputs"], second["pooler_outputs"]),
        )
        terms: dict[str, Tensor] = {}
        if self.weights["info_nce"]:
            terms["info_nce"] = torch.stack([self.info_nce(states[0][:, i], states[1][:, i]) for i in (0, 1)]).sum()
        if self.weights["interaction"]:
            streams = [states]
            if "cross_states" in first:
                streams.append((first["cross_states"], second["cross_states"]))
            terms["interaction"] = self.interaction(*streams)
        if self.weights["modulus"]:
            terms["modulus"] = self.modulus(*states, *pooled)
        return {name: self.weights[name] * term for name, term in terms.items()}

    def _views(self, columns: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
        """What the losses look at, of the first and of the second view."""
        if len(columns) == 2:
            return [self._read(column) for column in columns]
        if len(columns) != 1:
            raise ValueError(
                f"The data has {len(columns)} columns of text: JTCSELoss takes one, or two with two versions of each "
                "text."
            )
        # Both views in one pass; dropout falls on each row by itself.
        outputs = self._read({name: _twice(value) for name, value in columns[0].items()})
        halves = {name: output.chunk(2) for name, output in outputs.items()}
        return [{name: half[i] for name, half in halves.items()} for i in (0, 1)]

    def _read(self, features: dict[str, Any]) -> dict[str, Tensor]:
        outputs = self.model(features, tower_outputs=True, cross_stream=self.weights["interaction"] > 0)
        return {name: outputs[name] for name in _READ if name in outputs}

    def get_config_dict(self) -> dict[str, Any]:
        """For the model card."""
        return {
            "temperature": self.info_nce.temperature,
            **{f"{name}_weight": weight for name, weight in self.weights.items()},
            "least_cosine": self.modulus.least_cosine,
            "seed": self.interaction.seed,
        }

    @property
    def citation(self) -> str:
        """For the model card."""
        return """
@misc{zong2025jtcse,
    title = "JTCSE: Joint Tensor-Modulus Constraints and Cross-Attention for Unsupervised Contrastive Learning of
             Sentence Embeddings",
    author = "Zong, Tianyu and Yi, Hongzhu and Shi, Bingkang and Wang, Yuanxiang and Xu, Jungang",
    year = "2025",
    eprint = "2505.02366",
    archivePrefix = "arXiv",
    primaryClass = "cs.CL",
}
"""


def _twice(value: Any) -> Any:
    return torch.cat([value, value]) if isinstance(value, Tensor) else value
