"""The layout of a batch that is laid out in one way."""

from __future__ import annotations

from collections.abc import Sequence

from st_reba.text.builder import LayoutBuilder, lay_out
from st_reba.text.layout import Layout


def laid_out(
    builder: LayoutBuilder,
    texts: Sequence[str],
    *,
    max_tokens: int | None,
    positions: int | None = None,
    prompt: str | None = None,
) -> Layout:
    [rows] = lay_out([builder], texts, max_tokens=max_tokens, positions=positions, prompt=prompt)
    return builder.framed(rows)
