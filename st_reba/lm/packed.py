"""Texts one behind the other in one row, so that nothing is computed for padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..text.layout import sent


@dataclass(frozen=True)
class Packed:
    """B texts of N positions, whose real tokens stand in one row of T, at positions that begin anew with each text.

    Attributes:
        real: (B, N), which positions hold tokens, in the host's memory: at least one. A row's tokens stand at its
            front.
    """

    real: Tensor

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return int(self._lengths.max())

    @cached_property
    def start_of_the_longest(self) -> int:
        """Where it begins in the row."""
        return int(self._lengths[: int(self._lengths.argmax())].sum())

    @cached_property
    def _lengths(self) -> Tensor:
        return self.real.sum(dim=1)

    @cached_property
    def _position(self) -> Tensor:
        """(T,): each token's, in its own text."""
        return self.real.nonzero()[:, 1]

    def inputs(self, input_ids: Tensor, *, for_kernel: bool) -> dict[str, Any]:
        """What a model is given.

        Args:
            input_ids: (B, N).
            for_kernel: Whether besides, as ST does, what flash attention wants to know of where each text ends.
        """
        device = input_ids.device
        inputs: dict[str, Any] = {
            "input_ids": self.row(input_ids),
            "position_ids": sent(self._position[None], device),
        }
        if for_kernel:
            # A text without tokens is none in the row.
            lengths = self._lengths[self._lengths > 0]
            ends = sent(torch.nn.functional.pad(lengths.cumsum(dim=0), (1, 0)).int(), device)
            inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            inputs |= {"max_length_q": self.longest, "max_length_k": self.longest}
        return inputs

    def row(self, values: Tensor) -> Tensor:
        """(1, T, ...): what the texts have, (B, n, ...) with n from the longest text to N, one behind the other."""
        places = self._places(values.shape[1], values.device)
        return values.flatten(0, 1).index_select(0, places)[None]

    def padded(self, row: Tensor, length: int | None = None) -> Tensor:
        """(B, n, ...): what stands in the row, (1, T, ...), text below text, and zeros in padding; n is N if not given.

        ``length`` is at least that of the longest text.
        """
        length = self.real.shape[1] if length is None else length
        batch = len(self.real)
        whole = row.new_zeros(batch * length, *row.shape[2:])
        return whole.index_copy(0, self._places(length, row.device), row[0]).unflatten(0, (batch, length))

    def _places(self, length: int, device: torch.device) -> Tensor:
        """(T,): where the tokens stand in B texts of so many positions. Made once for all layers."""
        kind = length, device
        if kind not in self._found:
            text = self.real.nonzero()[:, 0]
            self._found[kind] = sent(text * length + self._position, device)
        return self._found[kind]

    @cached_property
    def _found(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}
