"""Texts in blocks of whole sentences, with slots for what token prepending writes before them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from .builder import LayoutBuilder, Marked, Plan, Row, Tokenization
from .layout import PREPENDED
from .templates import Template
from .tokens import Extent, Tokens

# What closes a sentence may stand behind its end; of the Chinese marks no space need follow.
_SENTENCE_END = re.compile(r"""[.!?…]+["'”’»)\]]*(?=\s|$)|[。！？]+[”’」』）]*|\n+""")


@dataclass(frozen=True)
class BlockPlan(Plan):
    """What a :class:`BlockLayoutBuilder` is made from.

    Attributes:
        block_length: As for :class:`BlockLayoutBuilder`.
        whole_sentences: Likewise.
    """

    block_length: int = 32
    whole_sentences: bool = True

    def builder(self, tokenizer: PreTrainedTokenizerBase) -> BlockLayoutBuilder:
        return BlockLayoutBuilder(
            self.template,
            tokenizer,
            block_length=self.block_length,
            whole_sentences=self.whole_sentences,
            tokenization=self.tokenization,
        )


class BlockLayoutBuilder(LayoutBuilder):
    """Layouts whose text is cut into blocks: one slot a block at the front, and one right before each block.

    Both slots of block b have the ``copy_index`` -2 - b.

    Args:
        template: Has one copy, and one ``{prepend}`` before it, where the slots at the front stand.
        tokenizer: Any Hugging Face tokenizer; a fast one for whole sentences.
        block_length: Tokens of a block; the last may have fewer.
        whole_sentences: Whether a block goes on to the end of a sentence.
        tokenization: As for :class:`LayoutBuilder`. Blocks are cut of the text's tokens in either case.

    Raises:
        ValueError: If the tokenizer does not say where its tokens lie, and sentences are asked for.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: PreTrainedTokenizerBase,
        *,
        block_length: int,
        whole_sentences: bool,
        tokenization: Tokenization = "whole",
    ) -> None:
        super().__init__(template, tokenizer, tokenization=tokenization)
        if whole_sentences and not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say where its tokens lie, so sentences are not found among them: "
                "use a fast tokenizer, or whole_sentences=False."
            )
        self.block_length = block_length
        self.whole_sentences = whole_sentences

    def room(self, positions: int, prompt: str | None = None) -> int:
        """How many tokens of text fit, each block with its two slots; less than 1 if none."""
        available = positions - (self.overhead(prompt) - 1)
        blocks, rest = divmod(available, self.block_length + 2)
        return blocks * self.block_length + max(0, rest - 2)

    def in_pieces(self, text: str, tokens: Tokens, prompt: Sequence[int]) -> Row:
        return self._in_blocks(text, super().in_pieces(text, tokens, prompt))

    def as_whole(self, text: str, kept: Extent, prompt: str, tokens: Tokens) -> Row | None:
        row = super().as_whole(text, kept, prompt, tokens)
        return row and self._in_blocks(text, row)

    def _in_blocks(self, text: str, row: Row) -> Row:
        """The row with a slot a block where one slot stands, and one right before each block."""
        may_end = [True] * row.text_length
        if self.whole_sentences:
            assert row.extents is not None
            may_end = _ends_sentence(text, row.extents)
        # Tokens of the text before each block.
        lengths = _block_lengths(may_end, self.block_length)
        starts = dict(zip(accumulate([0, *lengths]), range(len(lengths)), strict=False))
        marked: list[Marked] = []
        passed = 0
        for token, mark in row.marked:
            if mark == PREPENDED:
                marked += [(0, PREPENDED - block) for block in range(len(lengths))]
                continue
            if mark == 0:
                if passed in starts:
                    marked.append((0, PREPENDED - starts[passed]))
                passed += 1
            marked.append((token, mark))
        return Row(marked, row.extents)


def _block_lengths(may_end: Sequence[bool], length: int) -> list[int]:
    """Blocks of at least so many tokens that end where one may; the last ends with the text."""
    lengths, block = [], 0
    for ends in may_end:
        block += 1
        if ends and block >= length:
            lengths.append(block)
            block = 0
    return [*lengths, block] if block else lengths


def _ends_sentence(text: str, offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Of each token, whether the next one begins another sentence: a character may be several tokens."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    passed = [bisect_right(ends, start) for start, _ in offsets]
    return [later > earlier for earlier, later in zip(passed, [*passed[1:], passed[-1] if passed else 0], strict=False)]
