"""Texts in blocks of whole sentences, with slots for what token prepending writes before them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from .layout import PREPENDED, Layout, LayoutBuilder, Marked, Template, truncated

# What closes a sentence may stand behind its end; of the Chinese marks no space need follow.
_SENTENCE_END = re.compile(r"""[.!?…]+["'”’»)\]]*(?=\s|$)|[。！？]+[”’」』）]*|\n+""")


class BlockLayoutBuilder(LayoutBuilder):
    """Layouts whose text is cut into blocks: one slot a block at the front, and one right before each block.

    Both slots of block b have the ``copy_index`` -2 - b.

    Args:
        template: Has one copy, and one ``{prepend}`` before it, where the slots at the front stand.
        tokenizer: Any Hugging Face tokenizer; a fast one for whole sentences.
        block_length: Tokens of a block; the last may have fewer.
        whole_sentences: Whether a block goes on to the end of a sentence.

    Raises:
        ValueError: If the tokenizer does not say where its tokens lie, and sentences are asked for.
    """

    def __init__(
        self, template: Template, tokenizer: PreTrainedTokenizerBase, *, block_length: int, whole_sentences: bool
    ) -> None:
        super().__init__(template, tokenizer)
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

    def blocks(self, texts: Sequence[str], max_tokens: int | None) -> list[list[list[int]]]:
        """The token ids of each text, block by block."""
        if not self.whole_sentences:
            return [_cut(ids, [True] * len(ids), self.block_length) for ids in self.tokenize(texts, max_tokens)]
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        return [
            _cut(
                truncated(ids, max_tokens, self.tokenizer),
                _ends_sentence(text, truncated(offsets, max_tokens, self.tokenizer)),
                self.block_length,
            )
            for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def build(self, texts: Sequence[str], *, max_tokens: int | None, prompt: str | None = None) -> Layout:
        """Lay out a batch of texts, block by block."""
        return self._framed([self._in_blocks(blocks) for blocks in self.blocks(texts, max_tokens)], prompt)

    def _in_blocks(self, blocks: Sequence[Sequence[int]]) -> list[Marked]:
        before, after = self.literals
        slots = [(0, PREPENDED - block) for block in range(len(blocks))]
        body = [item for mark in before for item in (slots if mark[1] == PREPENDED else [mark])]
        for slot, ids in zip(slots, blocks, strict=True):
            body += [slot, *((token, 0) for token in ids)]
        return [*body, *after]


def _cut(ids: Sequence[int], may_end: Sequence[bool], length: int) -> list[list[int]]:
    """Blocks of at least so many tokens that end where one may; the last ends with the text."""
    blocks: list[list[int]] = []
    block: list[int] = []
    for token, ends in zip(ids, may_end, strict=True):
        block.append(token)
        if ends and len(block) >= length:
            blocks.append(block)
            block = []
    return [*blocks, block] if block else blocks


def _ends_sentence(text: str, offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Of each token, whether the next one begins another sentence: a character may be several tokens."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    passed = [bisect_right(ends, start) for start, _ in offsets]
    return [later > earlier for earlier, later in zip(passed, [*passed[1:], passed[-1] if passed else 0], strict=False)]
