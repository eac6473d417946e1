from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from st_reba.lm.attention.weights import diagonal_blocks, split
from st_reba.text.layout import Layout, repeated_chunks
from st_reba.text.tokens import special_tokens

from ..backbones import tokenizer
from .layouts import laid_out

TOKENIZERS = {kind: tokenizer(kind) for kind in ("bytes", "bert")}
texts = st.lists(st.text("ab 我", max_size=12), min_size=1, max_size=4)


def rows(layout: Layout, row: int) -> tuple[list[int], list[int]]:
    real = layout.attention_mask[row].bool()
    return layout.input_ids[row, real].tolist(), layout.copy_index[row, real].tolist()


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("last_only", [False, True])
@given(batch=texts, length=st.integers(1, 6), copies=st.integers(1, 3), prompt=st.sampled_from(["", "ab"]))
def test_chunks_are_what_is_cut_by_hand(kind, last_only, batch, length, copies, prompt):
    inner = TOKENIZERS[kind]
    layout = laid_out("{text}", inner, batch, tokenization="pieces", prompt=prompt)
    front, *own = (inner(text, add_special_tokens=False)["input_ids"] if text else [] for text in (prompt, *batch))
    before = special_tokens(inner)[0] + front
    expected = {}
    for text, ids in enumerate(own):
        chunks = [ids[first : first + length] for first in range(0, len(ids), length)] or [[]]
        for number, chunk in enumerate(chunks):
            if not last_only or number == len(chunks) - 1:
                copy_index = [copy for copy in range(copies) for _ in chunk]
                expected[text, number] = before + chunk * copies, [-1] * len(before) + copy_index
    if not any(own):
        # Where a text would begin is not known if there is none, and nothing is read.
        expected = {key: ([], []) for key in expected}

    found = repeated_chunks(layout, length, copies, last_only)
    keys = list(zip(found.text.tolist(), found.number.tolist(), strict=True))
    assert {key: rows(found.layout, row) for row, key in enumerate(keys)} == expected
    assert len(keys) == len(expected)
    sizes = found.layout.text_lengths
    assert (sizes.diff() <= 0).all()
    padding = found.layout.attention_mask == 0
    assert (found.layout.copy_index[padding] == -1).all()
    assert not found.layout.input_ids[padding].any()


def test_split_leaves_out_what_is_behind_and_fills_what_is_missing():
    values = torch.arange(10)[None]
    assert split(values, 1, 2, 3, 2).tolist() == [[[2, 3, 4], [5, 6, 7]]]
    assert split(values, 1, 2, 5, 2).tolist() == [[[2, 3, 4, 5, 6], [7, 8, 9, 0, 0]]]


def test_diagonal_blocks():
    values = torch.arange(2 * 3 * 49).view(2, 3, 7, 7)
    blocks = diagonal_blocks(values, 1, 4, 2)
    assert blocks.shape == (2, 2, 3, 4, 4)
    assert torch.equal(blocks[:, 0], values[:, :, 1:5, 1:5])
    assert torch.equal(blocks[:, 1, :, :2, :2], values[:, :, 5:, 5:])
    assert not blocks[:, 1, :, 2:].any()
    assert not blocks[:, 1, :, :, 2:].any()
