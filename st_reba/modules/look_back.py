"""The look back: tokens as weighted sums of the states that follow them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CopySums(NamedTuple):
    """What the tokens of a text, or its last alone, are up to the end of its copy c.

    Attributes:
        states: (B, rows, D), the last hidden states of the rows' tokens in copy c: Echo-c, or Classical for c = 1.
        sums: (B, rows, D), float32 or float64, the sums of a_ij v_j up to copy c: ReBA-c.
        totals: (B, rows, 1), the sums of a_ij.
        mask: (B, rows), which rows are real.
        ids: (B, rows), the tokens they belong to.
    """

    states: Tensor
    sums: Tensor
    totals: Tensor
    mask: Tensor
    ids: Tensor


class Sums(NamedTuple):
    """What the tokens of some texts look back to.

    Attributes:
        sums: (..., D), float32 or float64, the sums of a_ij v_j.
        totals: (..., 1), the sums of a_ij.
        dtype: That of the v_j.
    """

    sums: Tensor
    totals: Tensor
    dtype: torch.dtype


def backward_weights(maximum: Tensor, key: Tensor, query: Tensor, is_text: Tensor) -> Tensor:
    """a_ij from the maximum of log A_ji over layers and heads.

    Symmetrising a lower triangular map halves what is off the diagonal and leaves the diagonal as it is; so does
    symmetrising the maximum of such maps.

    Args:
        maximum: (B, rows, queries).
        key: (B, rows) positions i.
        query: (B, queries) positions j.
        is_text: (B, queries) whether j is a token of a copy of the text: only those are summed over.

    Returns:
        (B, rows, queries); 0 where j < i.
    """
    key, query = key[..., None], query[:, None]
    weights = torch.where((query >= key) & is_text[:, None], maximum, float("-inf")).exp()
    return torch.where(query == key, weights, 0.5 * weights)


def take(values: Tensor, index: Tensor) -> Tensor:
    """(B, n, D): of (B, N, D), the vectors at ``index`` (B, n)."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))
