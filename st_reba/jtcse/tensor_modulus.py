"""The loss that aligns two towers' positives in length as well as in direction."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import cosine_similarity


class TensorModulusLoss(nn.Module):
    r"""The tensor modulus constraint between two towers, both ways (JTCSE, Equations 13 and 14).

    .. math::
        L(i, j) = -\log \max(\cos(h_i, h_j^+), c) \cdot
        \frac{\lVert p_i - p_j^+ \rVert}{\lVert p_i \rVert + \lVert p_j^+ \rVert},
        \qquad L = L(I, II) + L(II, I)

    with h the last hidden state of CLS and p the pooler output, which, unlike h, no layer norm has brought to one
    length.

    Args:
        least_cosine: c, from where on the cosine counts: below, its logarithm is not defined, or too steep to learn
            from.

    Raises:
        ValueError: If ``least_cosine`` is not between 0 and 1.
    """

    def __init__(self, least_cosine: float = 1e-4) -> None:
        super().__init__()
        if not 0 < least_cosine < 1:
            raise ValueError(f"least_cosine={least_cosine!r}: give a number between 0 and 1; 1e-4 is the paper's.")
        self.least_cosine = least_cosine

    def forward(self, first: Tensor, second: Tensor, first_pooled: Tensor, second_pooled: Tensor) -> Tensor:
        """The loss of a batch, a scalar.

        Args:
            first: CLS of the first view of each text, (B, 2, D): tower I, tower II.
            second: Of the second view.
            first_pooled: The pooler outputs of the first view, (B, 2, D).
            second_pooled: Of the second view.
        """
        # Tower I beside tower II, and tower II beside tower I.
        second, second_pooled = second.flip(1), second_pooled.flip(1)
        cosines = cosine_similarity(first, second, dim=-1).clamp_min(self.least_cosine)
        lengths = vector_norm(first_pooled, dim=-1) + vector_norm(second_pooled, dim=-1)
        apart = vector_norm(first_pooled - second_pooled, dim=-1) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
        return (-cosines.log() * apart).sum(dim=1).mean()

    def extra_repr(self) -> str:
        return f"least_cosine={self.least_cosine}"
