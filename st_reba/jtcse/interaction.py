"""The contrastive loss between two towers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .info_nce import InfoNCELoss


class InteractionInfoNCELoss(nn.Module):
    r"""InfoNCE across two towers, whose roles a coin decides in each batch (JTCSE, Equation 12).

    .. math::
        R \sum_{s} L(s_I, s_{II}^+) + (1 - R) \sum_{s} L(s_{II}, s_I^+), \qquad R \in \{0, 1\}

    over the streams s: the towers' own states, and the cross-attention streams where there are any. All streams of a
    batch share one throw. The anchors are one tower's first view of each text, the positives the other tower's second
    view.

    The coin has a generator of its own, so that it takes nothing from the generator of dropout. Its state is part of
    ``state_dict()``, under the name that PyTorch gives to extra state.

    Args:
        temperature: As in :class:`InfoNCELoss`.
        seed: Of the coin.
    """

    def __init__(self, temperature: float = 0.05, seed: int = 42) -> None:
        super().__init__()
        self.info_nce = InfoNCELoss(temperature)
        self.seed = seed
        self.coin = torch.Generator().manual_seed(seed)

    def forward(self, *streams: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a batch, a scalar.

        Args:
            *streams: Of each stream, the first and the second view of the batch, (B, 2, D) each: tower I, tower II.
        """
        anchor = int(torch.randint(2, (1,), generator=self.coin))
        losses = [self.info_nce(first[:, anchor], second[:, 1 - anchor]) for first, second in streams]
        return torch.stack(losses).sum()

    def get_extra_state(self) -> Tensor:
        return self.coin.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        self.coin.set_state(state.cpu())
