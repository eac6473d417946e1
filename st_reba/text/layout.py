"""Batches of token ids that know which copy of the text each token belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tokens import Span

#: ``copy_index`` of special tokens, literals, the prompt and padding.
NOT_TEXT = -1
#: ``copy_index`` of the slot of token prepending, whose id is never read.
PREPENDED = -2

#: Beginnings of the names of features. A name that ends in one of them after a "_" would be a column of its own to
#: sentence-transformers' trainer.
FEATURES = ("input_ids", "attention_mask", "copy_index")

#: Tokens of one text in its layout: the id and the ``copy_index`` of each.
Row = list[tuple[int, int]]


@dataclass(frozen=True)
class Layout:
    """Batch of B token sequences of length N, padded on the right, in CPU memory.

    Attributes:
        input_ids: (B, N). Padding is id 0: no real token of a causal model sees it.
        attention_mask: (B, N), boolean, True for real tokens.
        copy_index: (B, N), the copy of the text that a token belongs to, 0 to k-1, or ``NOT_TEXT`` or ``PREPENDED``.
        past: Keys and values of tokens before these, a :class:`~st_reba.lm.prefixes.Past`; None if there are none.
        spans: For each text and each token of one copy, the characters of the text of which it holds any part; None for
            a text if the tokenizer has no offsets. Empty for a layout that is made of another.
    """

    input_ids: Tensor
    attention_mask: Tensor
    copy_index: Tensor
    past: Any = None
    spans: Sequence[list[Span] | None] = field(default=(), repr=False)

    @classmethod
    def of(cls, rows: Sequence[Row], spans: Sequence[list[Span] | None] = ()) -> Layout:
        """Pad rows into a batch."""
        lengths = [len(row) for row in rows]
        # Through NumPy: PyTorch takes ten times as long for a tensor of nested lists.
        flat = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.int64, 2 * sum(lengths)).reshape(-1, 2)
        mask = np.arange(max([1, *lengths])) < np.array(lengths)[:, None]
        ids, copies = np.zeros(mask.shape, np.int64), np.full(mask.shape, NOT_TEXT, np.int64)
        ids[mask], copies[mask] = flat.T
        return cls(torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(copies), spans=spans)

    @classmethod
    def from_features(cls, features: Mapping[str, Any], number: int = 0) -> Layout:
        """Read layout ``number`` of a module's features, which sentence-transformers may move, and pad with zeros."""
        ids, mask, copies = (features[f"{name}_{number}" if number else name].cpu() for name in FEATURES)
        return cls(ids, mask.bool(), copies.masked_fill(mask == 0, NOT_TEXT))

    def features(self, number: int = 0) -> dict[str, Tensor]:
        """Return the features from which :meth:`from_features` makes the layout."""
        parts = (self.input_ids, self.attention_mask.long(), self.copy_index)
        return {f"{name}_{number}" if number else name: part for name, part in zip(FEATURES, parts, strict=True)}

    @cached_property
    def lengths(self) -> Tensor:
        """Number of real tokens in each row, (B,)."""
        return self.attention_mask.sum(dim=1)

    @cached_property
    def ends(self) -> Tensor:
        """Position of the last token of each row, (B,); 0 in a row without tokens."""
        return (self.lengths - 1).clamp(min=0)

    @cached_property
    def is_empty(self) -> Tensor:
        """Whether each row has no token of text, (B,)."""
        return ~(self.copy_index >= 0).any(dim=1)

    @cached_property
    def shared_prefix(self) -> tuple[int, ...]:
        """Tokens before every text and every slot of token prepending, alike in all rows with a text."""
        real = ~self.is_empty
        if not real.any():
            return ()
        length = int((self.copy_index[real] != NOT_TEXT).int().argmax(dim=1).min())
        ids = self.input_ids[real, :length]
        alike = int((ids == ids[:1]).all(dim=0).long().cumprod(dim=0).sum())
        return tuple(ids[0, :alike].tolist())

    def part(self, rows: Tensor) -> Layout:
        """Return some of the rows, at least one, without columns that only the others need."""
        return self.columns(slice(max(1, int(self.lengths[rows].max()))), rows)

    def columns(self, columns: slice, rows: slice | Tensor = slice(None)) -> Layout:
        """Return some of the columns, of all rows or some."""
        ids, mask, copies = (part[rows, columns] for part in (self.input_ids, self.attention_mask, self.copy_index))
        return replace(self, input_ids=ids, attention_mask=mask, copy_index=copies, spans=())
