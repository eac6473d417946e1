"""Long texts cut into chunks that are read on their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import NOT_TEXT, Layout


@dataclass(frozen=True)
class Chunks:
    """The chunks of B texts, each repeated on its own, the longest first.

    Attributes:
        layout: R chunks, as a :class:`Layout` of as many texts. What stands before a text stands before each chunk.
        text: (R,), the text that each is cut from.
        number: (R,), which of its chunks it is.
    """

    layout: Layout
    text: Tensor
    number: Tensor


def chunk_sizes(layout: Layout, length: int) -> Tensor:
    """(B, count): tokens in each chunk of each text, at most ``length``; 0 behind its end. There is at least one."""
    first = torch.arange(0, layout.longest_text, length)
    return (layout.text_lengths[:, None] - first).clamp(0, length)


def repeated_chunks(layout: Layout, length: int, copies: int, last_only: bool = False) -> Chunks:
    """Cut texts into chunks and repeat each.

    Args:
        layout: B texts that stand once.
        length: Tokens of a chunk; the last of a text may be shorter.
        copies: How often each chunk stands in its row.
        last_only: Leave out all but the last chunk of each text.

    Returns:
        The chunks. A text without tokens has one, without tokens.
    """
    start, sizes = layout.text_start, chunk_sizes(layout, length)
    number = torch.arange(sizes.shape[1])
    last = (layout.text_lengths[:, None] - 1).clamp(min=0) // length
    text, number = (number == last if last_only else number <= last).nonzero(as_tuple=True)
    order = sizes[text, number].argsort(descending=True, stable=True)
    text, number = text[order], number[order]
    size = sizes[text, number][:, None]
    position = torch.arange(max(1, start + copies * int(size.max())))[None]
    offset = position - start
    real = offset < copies * size
    # A row without tokens would divide by zero; nothing of it is real.
    in_chunk, copy = offset % size.clamp(min=1), offset // size.clamp(min=1)
    source = torch.where(offset < 0, position, start + number[:, None] * length + in_chunk)
    ids = layout.input_ids[text[:, None], source.clamp(max=layout.input_ids.shape[1] - 1)]
    repeated = Layout(ids.where(real, 0), real, copy.where(real & (offset >= 0), NOT_TEXT))
    return Chunks(repeated, text, number)
