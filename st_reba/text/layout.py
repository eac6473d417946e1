"""How often a text stands in the input, and which copy each token belongs to.

Nothing here knows a model or a method: every readout of every method is a question about ``Layout.copy_index``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

NOT_TEXT = -1

#: The ``copy_index`` of a slot of token prepending; that of a text's second block is one less, and so on.
PREPENDED = -2


@dataclass(frozen=True)
class Layout:
    """A batch of B token sequences, N long, padded on the right.

    Attributes:
        input_ids: (B, N). Padding is id 0: a causal model's real tokens never see it, so any id will do.
        attention_mask: (B, N), 1 for real tokens.
        copy_index: (B, N), the copy a token belongs to (0 .. k-1), or -1 for all that is not text: special tokens,
            literals, the prompt, padding. -2 and less: the slots of token prepending, whose id means nothing.
    """

    input_ids: Tensor
    attention_mask: Tensor
    copy_index: Tensor

    @property
    def text_length(self) -> Tensor:
        """(B,) tokens in one copy of each text; 0 for an empty text."""
        return (self.copy_index == 0).sum(dim=1)

    @property
    def text_start(self) -> int:
        """Position of the first text token, the same in every row where all have one prompt."""
        is_text = (self.copy_index >= 0).any(dim=0)
        return int(is_text.int().argmax())

    @property
    def text_starts(self) -> Tensor:
        """(B,) the position of each text's first token; 0 for an empty text."""
        return (self.copy_index >= 0).int().argmax(dim=1)

    def part(self, texts: slice | Tensor) -> Layout:
        """The same layout for some of the texts, without the columns that only the others needed.

        ``texts`` are their indices, at least one.
        """
        longest = max(1, int(self.attention_mask[texts].sum(dim=1).max()))
        return Layout(*(part[texts, :longest] for part in (self.input_ids, self.attention_mask, self.copy_index)))

    @classmethod
    def interleaved(cls, layouts: Sequence[Layout]) -> Layout:
        """P layouts of the same B texts as one of B * P rows, those of a text together."""
        return cls(*(torch.stack(parts, dim=1).flatten(0, 1) for parts in _padded(layouts)))

    @classmethod
    def joined(cls, layouts: Sequence[Layout]) -> Layout:
        """Layouts of other texts each, one below the other."""
        return cls(*(torch.cat(parts) for parts in _padded(layouts)))


def _padded(layouts: Sequence[Layout]) -> Iterator[list[Tensor]]:
    """The parts of layouts, as long as the longest."""
    length = max(layout.input_ids.shape[1] for layout in layouts)
    for name, padding in (("input_ids", 0), ("attention_mask", 0), ("copy_index", NOT_TEXT)):
        parts = [getattr(layout, name) for layout in layouts]
        yield [pad(part, (0, length - part.shape[1]), value=padding) for part in parts]
