"""Text to token ids: a template such as ``"{text}{text}"`` and a batch of texts become a :class:`Layout`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .layout import NOT_TEXT, PREPENDED, Layout
from .templates import PREPEND, Template
from .tokens import Extent, Tokens, cut, separator, special_tokens, tokenized

#: How a template that has one slot becomes tokens: see :class:`LayoutBuilder`.
Tokenization = Literal["whole", "pieces"]

# How many prompts' ids are kept.
_PROMPTS = 64

#: A token's id and what :attr:`Layout.copy_index` says of it.
Marked = tuple[int, int]


class Row(NamedTuple):
    """A text in its layout, without special tokens.

    Attributes:
        marked: All tokens.
        extents: For each token of one copy of the text, the characters of the text that it holds any part of; None
            where the tokenizer does not say.
    """

    marked: list[Marked]
    extents: list[Extent] | None

    @property
    def text_length(self) -> int:
        """Tokens of one copy."""
        return sum(mark == 0 for _, mark in self.marked)


@dataclass(frozen=True)
class Plan:
    """How texts are laid out, whatever the tokenizer: what a :class:`LayoutBuilder` is made from. Plans compare.

    Attributes:
        template: As for :class:`LayoutBuilder`.
        tokenization: Likewise.
        end: Likewise.
    """

    template: Template
    tokenization: Tokenization = "whole"
    end: bool = False

    def builder(self, tokenizer: PreTrainedTokenizerBase) -> LayoutBuilder:
        """Ask a tokenizer what it takes."""
        return LayoutBuilder(self.template, tokenizer, tokenization=self.tokenization, end=self.end)


class LayoutBuilder:
    """Turns texts into layouts, for one template and one tokenizer.

    A template that repeats the text is tokenised in pieces: the text once, and its ids stand in every slot, so all
    copies are the same, token for token; what stands between them, and the prompt, on their own. One that has the text
    once is tokenised whole: prompt, literals and text as one string, as a model reads it anywhere else. A token that
    holds characters of the text and of what stands beside it (``"`` and the text's first letter, in some tokenizers)
    counts as text.

    A text is cut before the whole is tokenised: to so many of *its own* tokens, at a character's end, and by more where
    it has more tokens as part of the whole. Where not one character fits, or a tokenizer does not say where its tokens
    lie and they do not spell the string, this text is laid out in pieces.

    Args:
        template: What stands around and between the copies.
        tokenizer: Any Hugging Face tokenizer. Its padding side, padding token and chat template do not matter.
        tokenization: ``"whole"``, or ``"pieces"`` for templates with one slot, too.
        end: Whether each layout must end in the tokenizer's end-of-sequence token, added where it adds none itself.

    Raises:
        ValueError: If there is no token to end with, or the tokenizer's special tokens cannot be told from text.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tokenization: Tokenization = "whole",
        end: bool = False,
    ) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.whole = tokenization == "whole" and template.copies == 1
        self.specials_before, self.specials_after = special_tokens(tokenizer)
        eos = tokenizer.eos_token_id
        if end and not self.specials_after and eos is None:
            raise ValueError(f"{type(tokenizer).__name__} has no end-of-sequence token: set tokenizer.eos_token.")
        if end and eos is not None and self.specials_after[-1:] != [eos]:
            self.specials_after = [*self.specials_after, eos]
        self._prompts: dict[str, list[int]] = {}

    @cached_property
    def literals(self) -> list[list[Marked]]:
        """The template's literals, each tokenised on its own."""
        return [self._marked(literal) for literal in self.template.literals]

    def overhead(self, prompt: str | None = None) -> int:
        """Tokens of a layout in pieces that are not text: special tokens, literals and the prompt.

        As a whole they may be a few more or less.
        """
        literals = sum(map(len, self.literals))
        return len(self.specials_before) + len(self.prompt_ids(prompt)) + literals + len(self.specials_after)

    def room(self, positions: int, prompt: str | None = None) -> int:
        """How many tokens one copy may have if the whole layout is to fit ``positions``; less than 1 if none."""
        return (positions - self.overhead(prompt)) // self.template.copies

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, whole, without special tokens."""
        return [tokens.ids for tokens in tokenized(self.tokenizer, texts)]

    def framed(self, rows: Sequence[Row]) -> Layout:
        """The layout of rows: special tokens stand once, at the two ends; the prompt once, behind the leading ones."""
        before, after = _not_text(self.specials_before), _not_text(self.specials_after)
        lines = [[*before, *row.marked, *after] for row in rows]
        lengths = [len(line) for line in lines]
        # By way of NumPy: PyTorch takes ten times as long for a tensor of a list of lists of pairs.
        marked = np.fromiter(chain.from_iterable(chain.from_iterable(lines)), np.int64, 2 * sum(lengths)).reshape(-1, 2)
        real = np.arange(max([1, *lengths])) < np.array(lengths)[:, None]
        ids, marks = np.zeros(real.shape, np.int64), np.full(real.shape, NOT_TEXT, np.int64)
        ids[real], marks[real] = marked.T
        return Layout(*map(torch.from_numpy, (ids, real.astype(np.int64), marks)))

    def length(self, row: Row) -> int:
        """Tokens of a row's layout."""
        return len(self.specials_before) + len(row.marked) + len(self.specials_after)

    def excess(self, row: Row, max_tokens: int | None, positions: int | None) -> int:
        """How many tokens a row is too long, by either limit; 0 or less where it fits."""
        too_long = 0 if max_tokens is None else row.text_length - max_tokens
        return too_long if positions is None else max(too_long, self.length(row) - positions)

    def in_pieces(self, text: str, tokens: Tokens, prompt: Sequence[int]) -> Row:
        """A row of literals and copies that were tokenised on their own.

        Args:
            text: The text.
            tokens: Those of its tokens that stand in every slot.
            prompt: The prompt's ids.
        """
        marked = [*_not_text(prompt), *self.literals[0]]
        for copy, literal in enumerate(self.literals[1:]):
            marked += [*((token, copy) for token in tokens.ids), *literal]
        return Row(marked, tokens.extents)

    def whole_string(self, text: str, kept: Extent, prompt: str) -> str:
        """What is tokenised of a text, of which these characters are laid out, with all that stands around it."""
        return self._lead(prompt).text + text[slice(*kept)] + self.template.literals[1]

    def as_whole(self, text: str, kept: Extent, prompt: str, tokens: Tokens) -> Row | None:
        """A row of a text that was tokenised with all that stands around it; None where that cannot be.

        Args:
            text: The text.
            kept: Its characters that are laid out.
            prompt: Literal text at the front.
            tokens: Those of :meth:`whole_string`.
        """
        return _as_whole(tokens, self._lead(prompt), kept, bool(self.template.literals[1]))

    def prompt_ids(self, prompt: str | None) -> list[int]:
        """The ids of a prompt on its own, which is asked for once."""
        if not prompt:
            return []
        if prompt not in self._prompts:
            # Where each text has one of its own, none comes again.
            if len(self._prompts) >= _PROMPTS:
                self._prompts.clear()
            self._prompts[prompt] = self._ids(prompt)
        return self._prompts[prompt]

    def _lead(self, prompt: str) -> _Lead:
        """What stands before a text. A slot splits a string, as an entry added to the vocabulary does."""
        before, *after = self.template.literals[0].split(PREPEND)
        if not after:
            return _Lead([], prompt + before, None)
        if self._separator is None:
            return _Lead([*_not_text(self.prompt_ids(prompt + before)), (0, PREPENDED)], after[0], None)
        first = len(prompt + before)
        text = prompt + before + self._separator + after[0]
        return _Lead([], text, (first, first + len(self._separator)))

    @cached_property
    def _separator(self) -> str | None:
        return separator(self.tokenizer)

    def _marked(self, literal: str) -> list[Marked]:
        first, *others = (_not_text(self._ids(part)) for part in literal.split(PREPEND))
        return [*first, *(item for part in others for item in ((0, PREPENDED), *part))]

    def _ids(self, literal: str) -> list[int]:
        return self.tokenize([literal])[0] if literal else []


def lay_out(
    builders: Sequence[LayoutBuilder],
    texts: Sequence[str],
    *,
    max_tokens: int | None,
    positions: int | None,
    prompt: str | None,
) -> list[list[Row]]:
    """The rows of a batch of texts in several layouts, cut alike: each stands in all of them, or in none, by as much.

    Args:
        builders: One for each layout, of one tokenizer.
        texts: B strings.
        max_tokens: How many tokens one copy may have; at most :meth:`LayoutBuilder.room`. None: no limit.
        positions: How many tokens a whole layout may have; None: no limit.
        prompt: Literal text at the front.

    Returns:
        For each layout, B rows.
    """
    first, prompt = builders[0], prompt or ""
    side = first.tokenizer.truncation_side
    own = tokenized(first.tokenizer, texts)
    known = dict(zip(texts, own, strict=True))
    kept = [len(tokens.ids) if max_tokens is None else min(len(tokens.ids), max_tokens) for tokens in own]
    rows: dict[int, list[Row]] = {}
    pending = [index for index, tokens in enumerate(own) if first.whole and tokens.ids and tokens.extents is not None]
    while pending:
        parts = {index: cut(texts[index], own[index], kept[index], side) for index in pending}
        given = {index: (texts[index], part, prompt) for index, part in parts.items() if part[0] < part[1]}
        strings = {index: [builder.whole_string(*of_text) for builder in builders] for index, of_text in given.items()}
        # One call of the tokenizer for all layouts.
        new = [string for string in dict.fromkeys(chain(*strings.values())) if string not in known]
        known.update(zip(new, tokenized(first.tokenizer, new), strict=True))
        shorter = []
        for index, of_text in given.items():
            found = [
                builder.as_whole(*of_text, known[string])
                for builder, string in zip(builders, strings[index], strict=True)
            ]
            wholes = [row for row in found if row is not None]
            if len(wholes) < len(builders):
                continue
            excess = max(
                builder.excess(row, max_tokens, positions) for builder, row in zip(builders, wholes, strict=True)
            )
            if excess > 0:
                kept[index] -= excess
                shorter.append(index)
            else:
                rows[index] = wholes
        pending = shorter
    front = first.prompt_ids(prompt) if len(rows) < len(texts) else []
    for index in set(range(len(texts))) - rows.keys():
        tokens = own[index].truncated(max_tokens, side)
        rows[index] = [builder.in_pieces(texts[index], tokens, front) for builder in builders]
    return [[rows[index][number] for index in range(len(texts))] for number in range(len(builders))]


class _Lead(NamedTuple):
    """What stands before a text: tokens that are split off, what is tokenised with it, and a slot's place in that."""

    split_off: list[Marked]
    text: str
    slot: Extent | None


def _as_whole(tokens: Tokens, lead: _Lead, part: Extent, more_follows: bool) -> Row | None:
    """The row of a string that begins with ``lead.text`` and goes on with this part of a text.

    None where no token is known to hold any of the text, or the slot is not found.
    """
    if tokens.extents is None:
        return None
    begin = len(lead.text)
    end = begin + part[1] - part[0]
    # A mark that a tokenizer adds at either end of a string belongs to the text, if nothing else stands there.
    first = next((i for i, (_, last) in enumerate(tokens.extents) if last > begin), len(tokens.ids)) if begin else 0
    stop = len(tokens.ids)
    if more_follows:
        stop = next((i for i in range(first, stop) if tokens.extents[i][0] >= end), stop)
    marks = [0 if first <= i < stop else NOT_TEXT for i in range(len(tokens.ids))]
    if lead.slot is not None and lead.slot in tokens.extents:
        marks[tokens.extents.index(lead.slot)] = PREPENDED
    if first >= stop or (lead.slot is not None and PREPENDED not in marks):
        return None
    marked = [(0 if mark == PREPENDED else token, mark) for token, mark in zip(tokens.ids, marks, strict=True)]
    shift = part[0] - begin
    extents = [(max(a, begin) + shift, min(b, end) + shift) for a, b in tokens.extents[first:stop]]
    return Row([*lead.split_off, *marked], extents)


def _not_text(ids: Sequence[int]) -> list[Marked]:
    return [(token, NOT_TEXT) for token in ids]
