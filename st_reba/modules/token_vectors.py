"""What a method hands on: vectors of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

#: A feature that is handed on where each text is to be computed alone, behind the language model, too.
ONE_BY_ONE = "one_by_one"


class TokenVectors(NamedTuple):
    """The vectors of the tokens of B texts.

    Attributes:
        states: (B, n, D).
        mask: (B, n), which of them are real.
        ids: (B, n), the tokens they belong to.
        extra: More features to hand on, each (B, ...).
    """

    states: Tensor
    mask: Tensor
    ids: Tensor
    extra: dict[str, Tensor] = {}


def in_parts(rows: int, size: int) -> tuple[Tensor, ...]:
    """The indices of rows, in parts of at most ``size``.

    All parts are of nearly one size: a last part of a row or two would waste what the others gain.
    """
    return torch.arange(rows).chunk(ceil(rows / size))


def joined(parts: Sequence[TokenVectors], rows: Sequence[Tensor]) -> TokenVectors:
    """What several parts of a batch gave, as one, padded to the longest n; ``rows`` are the indices of each."""
    if len(parts) == 1:
        return parts[0]
    length = max(part.mask.shape[1] for part in parts)
    order = torch.cat([*rows]).argsort().to(parts[0].states.device, non_blocking=True)
    return TokenVectors(
        torch.cat([pad(part.states, (0, 0, 0, length - part.states.shape[1])) for part in parts])[order],
        torch.cat([pad(part.mask, (0, length - part.mask.shape[1])) for part in parts])[order],
        torch.cat([pad(part.ids, (0, length - part.ids.shape[1])) for part in parts])[order],
        {name: torch.cat([part.extra[name] for part in parts])[order] for name in parts[0].extra},
    )


def picked(states: Tensor, ids: Tensor, selected: Tensor) -> TokenVectors:
    """The selected tokens of each row, moved to its front, without the columns that no row needs.

    Args:
        states: (B, N, D).
        ids: (B, N), in the CPU's memory.
        selected: (B, N), boolean, in the CPU's memory.

    Returns:
        The vectors of n tokens, where the states are; n is at least 1.
    """
    counts = selected.sum(dim=1)
    length = max(1, int(counts.max()))
    order = (~selected).to(torch.int8).argsort(dim=1, stable=True)[:, :length]
    mask, ids = torch.arange(length) < counts[:, None], ids.gather(1, order)
    order, mask, ids = (part.to(states.device, non_blocking=True) for part in (order, mask, ids))
    return TokenVectors(states.gather(1, order[..., None].expand(-1, -1, states.shape[-1])), mask, ids)


def without_empty(states: Tensor, mask: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros wherever nothing was read.

    Args:
        states: (B, n, D).
        mask: (B, n), boolean: which of them are real.
        empty: (B,), boolean: which texts have no tokens.

    Returns:
        The states and the mask, in which a text without tokens has one vector of zeros.
    """
    empty = empty.to(states.device, non_blocking=True)
    states = states.masked_fill(~mask[..., None] | empty[:, None, None], 0)
    mask = mask & ~empty[:, None]
    mask[:, 0] |= empty
    return states, mask


def last_of(selected: Tensor) -> Tensor:
    """(B, N): of the tokens selected in each row, (B, N) booleans, the last; none where there are none."""
    later = selected.flip(1).cumsum(dim=1).flip(1)
    return selected & (later == 1)


def last_position(selected: Tensor) -> Tensor:
    """(B,): where the last of the tokens selected in each row, (B, N) booleans, stands; 0 where there are none."""
    return last_of(selected).int().argmax(dim=1)
