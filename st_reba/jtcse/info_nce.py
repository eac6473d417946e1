"""The contrastive loss between two views of a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize


class InfoNCELoss(nn.Module):
    r"""Each text's anchor shall be nearer to its own positive than to the positives of the other texts.

    .. math::
        L(h, h^+) = -\frac{1}{B} \sum_i \log
        \frac{e^{\cos(h_i, h_i^+) / \tau}}{\sum_j e^{\cos(h_i, h_j^+) / \tau}}

    (SimCSE; JTCSE, Equation 11.)

    Args:
        temperature: :math:`\tau`, greater than 0.

    Raises:
        ValueError: If the temperature is not greater than 0.
    """

    def __init__(self, temperature: float = 0.05) -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature!r}: give a number greater than 0; 0.05 is usual.")
        self.temperature = temperature

    def forward(self, anchors: Tensor, positives: Tensor) -> Tensor:
        """The loss of a batch, a scalar; (B, D) each, of any length."""
        cosines = normalize(anchors, dim=-1) @ normalize(positives, dim=-1).mT
        return cross_entropy(cosines / self.temperature, torch.arange(len(anchors), device=anchors.device))

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"
