"""Text to token ids: templates such as ``"{text}{text}"`` and a batch of texts become a :class:`Layout` each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .layout import NOT_TEXT, PREPENDED, Layout
from .templates import PREPEND, PROMPT, Template
from .tokens import Span, Tokens, cut, separator, special_tokens, tokenized

#: How a template that has one slot becomes tokens: see :func:`lay_out`.
Tokenization = Literal["whole", "pieces"]

#: A token's id and what :attr:`Layout.copy_index` says of it.
Marked = tuple[int, int]


class Frame(NamedTuple):
    """A template and a prompt as a tokenizer reads them, each of their parts on its own.

    Attributes:
        template: The template.
        front: The prompt at the front; empty where the template has a slot for it.
        strings: Each literal of the template, with the prompt in its slot, cut where a slot of token prepending stands.
        before: Special tokens at the very front.
        prompt: The tokens of ``front``, behind the special tokens.
        literals: The tokens of each literal of the template; a slot of token prepending is one of them.
        after: Special tokens at the very end.
    """

    template: Template
    front: str
    strings: list[list[str]]
    before: list[Marked]
    prompt: list[Marked]
    literals: list[list[Marked]]
    after: list[Marked]

    @property
    def overhead(self) -> int:
        """Tokens of a layout in pieces that are not text. As a whole they may be a few more or less."""
        return len([*self.before, *self.prompt, *chain(*self.literals), *self.after])


class _Row(NamedTuple):
    """A text in its layout.

    Attributes:
        marked: All tokens.
        spans: For each token of one copy of the text, the characters of the text that it holds any part of; None where
            the tokenizer does not say.
    """

    marked: list[Marked]
    spans: list[Span] | None


class _Sides(NamedTuple):
    """What stands around a text and is tokenised with it, as one string.

    Attributes:
        split_off: Tokens before the string: a slot splits a string, as an entry added to the vocabulary does.
        front: The string's beginning.
        slot: Where a slot's separator stands in it, if one does.
        behind: The string's end.
    """

    split_off: list[Marked]
    front: str
    slot: Span | None
    behind: str


def frames(templates: Sequence[Template], tokenizer: PreTrainedTokenizerBase, prompt: str = "") -> list[Frame]:
    """What stands around a text in each of these templates.

    Raises:
        ValueError: If the tokenizer has no token that a layout could end with, or its special tokens cannot be told
            from text.
    """
    before, after = special_tokens(tokenizer)
    # Cut first: a prompt that reads like a slot of token prepending is a prompt.
    cut_up = [
        [[part.replace(PROMPT, prompt) for part in literal.split(PREPEND)] for literal in template.literals]
        for template in templates
    ]
    # Some tokenizers make a token of no character.
    strings = [string for string in dict.fromkeys([prompt, *chain(*chain(*cut_up))]) if string]
    ids = [_not_text(tokens.ids) for tokens in tokenized(tokenizer, strings)]
    found: dict[str, list[Marked]] = {"": [], **dict(zip(strings, ids, strict=True))}
    eos, name = tokenizer.eos_token_id, type(tokenizer).__name__
    result = []
    for template, literals in zip(templates, cut_up, strict=True):
        if template.end and not after and eos is None:
            raise ValueError(f"{name} has no end-of-sequence token: set tokenizer.eos_token.")
        ends = [eos] if template.end and eos is not None and after[-1:] != [eos] else []
        marked = [
            [*found[first], *(token for part in others for token in ((0, PREPENDED), *found[part]))]
            for first, *others in literals
        ]
        front = "" if template.takes_prompt else prompt
        behind = _not_text([*after, *ends])
        result.append(Frame(template, front, literals, _not_text(before), found[front], marked, behind))
    return result


def room(around: Sequence[Frame], positions: int) -> int:
    """How many tokens one copy of a text may have if all of these layouts are to fit a model's positions.

    Raises:
        ValueError: If none.
    """
    rooms = []
    for frame in around:
        overhead, copies = frame.overhead, frame.template.copies
        left = (positions - overhead) // copies
        if left < 1:
            raise ValueError(
                f"{overhead} tokens of prompt, template and special tokens leave no room for {copies} copies of a text "
                f"in the model's {positions} positions. Use fewer repetitions, or a shorter template or prompt."
            )
        rooms.append(left)
    return min(rooms)


def lay_out(
    templates: Sequence[Template],
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    prompt: str | Sequence[str] = "",
    max_tokens: int | None = None,
    positions: int | None = None,
    tokenization: Tokenization = "whole",
) -> list[Layout]:
    """The layouts of a batch of texts in several templates, cut alike: each text stands in all, or in none, by as much.

    A template that repeats the text is tokenised in pieces: the text once, and its ids stand in every slot, so all
    copies are the same, token for token; what stands between them, and the prompt, on their own. One that has the text
    once is tokenised whole: prompt, literals and text as one string, as a model reads it anywhere else. A token that
    holds characters of the text and of what stands beside it (``"`` and the text's first letter, in some tokenizers)
    counts as text. Special tokens stand once, at the two ends; the prompt stands once, behind the leading ones.

    A text is cut before the whole is tokenised: to so many of *its own* tokens, at a character's end, and by more where
    it has more tokens as part of the whole. Where not one character fits, or a tokenizer does not say where its tokens
    lie and they do not spell the string, this text is laid out in pieces.

    Args:
        templates: One for each layout; all have one copy of the text, or more.
        tokenizer: Any Hugging Face tokenizer. Its padding side, padding token and chat template do not matter.
        texts: B strings.
        prompt: Literal text at the front of every text, or in the template's slot for it; or B strings, one for each.
        max_tokens: How many tokens one copy may have; None: no limit.
        positions: How many tokens a whole layout may have; None: no limit.
        tokenization: ``"whole"``, or ``"pieces"`` for templates with one slot, too.

    Returns:
        For each template, the layout of B texts.

    Raises:
        ValueError: If there is no room for text, or a template has a slot for a prompt that is blank, or the tokenizer
            cannot be used: see :func:`frames`.
    """
    prompts = [prompt] * len(texts) if isinstance(prompt, str) else prompt
    rows: dict[int, list[_Row]] = {}
    for front in dict.fromkeys(prompts):
        for template in templates:
            template.check_prompt(front)
        chosen = [index for index, own in enumerate(prompts) if own == front]
        around = frames(templates, tokenizer, front)
        found = _rows(around, tokenizer, [texts[index] for index in chosen], max_tokens, positions, tokenization)
        rows.update(zip(chosen, found, strict=True))
    return [_layout([rows[index][number] for index in range(len(texts))]) for number in range(len(templates))]


def _rows(
    around: Sequence[Frame],
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_tokens: int | None,
    positions: int | None,
    tokenization: Tokenization,
) -> list[list[_Row]]:
    """The rows of each text, one for each frame."""
    available = sys.maxsize if positions is None else positions
    limit = min(room(around, available), sys.maxsize if max_tokens is None else max_tokens)
    own, cut_side = tokenized(tokenizer, texts), tokenizer.truncation_side
    known = dict(zip(texts, own, strict=True))
    rows: dict[int, list[_Row]] = {}
    # How many of its own tokens each text is cut to that may be tokenised with what stands around it.
    pending: dict[int, int] = {}
    if tokenization == "whole" and around[0].template.copies == 1:
        for index, tokens in enumerate(own):
            if tokens.ids and tokens.spans is not None:
                pending[index] = min(len(tokens.ids), limit)
    sides = [_sides(frame, tokenizer) for frame in around] if pending else []
    while pending:
        parts = {index: cut(texts[index], own[index], count, cut_side) for index, count in pending.items()}
        strings = {
            index: [side.front + texts[index][first:last] + side.behind for side in sides]
            for index, (first, last) in parts.items()
            if first < last
        }
        # One call of the tokenizer for all layouts.
        new = [string for string in dict.fromkeys(chain(*strings.values())) if string not in known]
        known.update(zip(new, tokenized(tokenizer, new), strict=True))
        shorter = {}
        for index, of_text in strings.items():
            whole = [
                _as_whole(frame, side, parts[index], known[string])
                for frame, side, string in zip(around, sides, of_text, strict=True)
            ]
            found = [row for row in whole if row is not None]
            if len(found) < len(whole):
                continue
            excess = max(max(len(row.spans or ()) - limit, len(row.marked) - available) for row in found)
            if excess > 0:
                shorter[index] = pending[index] - excess
            else:
                rows[index] = found
        pending = shorter
    for index in set(range(len(texts))) - rows.keys():
        # Not by the tokenizer: a fast one keeps that as its state, which another thread may change before it is used.
        ids, spans = own[index]
        kept = slice(max(0, len(ids) - limit), None) if cut_side == "left" else slice(limit)
        tokens = Tokens(ids[kept], None if spans is None else spans[kept])
        rows[index] = [_in_pieces(frame, tokens) for frame in around]
    return [rows[index] for index in range(len(texts))]


def _sides(frame: Frame, tokenizer: PreTrainedTokenizerBase) -> _Sides:
    (before, *after), (behind,) = frame.strings
    front = frame.front + before
    if not after:
        return _Sides([], front, None, behind)
    entry = separator(tokenizer)
    if entry is None:
        split_off = _not_text(tokenized(tokenizer, [front])[0].ids) if front else []
        return _Sides([*split_off, (0, PREPENDED)], after[0], None, behind)
    return _Sides([], front + entry + after[0], (len(front), len(front + entry)), behind)


def _as_whole(frame: Frame, sides: _Sides, part: Span, tokens: Tokens) -> _Row | None:
    """The row of a part of a text that was tokenised as one string with what stands around it.

    None where no token is known to hold any of the text, or the slot is not found.
    """
    if tokens.spans is None or (sides.slot is not None and sides.slot not in tokens.spans):
        return None
    begin = len(sides.front)
    end = begin + part[1] - part[0]
    # A mark that a tokenizer adds at either end of a string belongs to the text, if nothing else stands there.
    starts, ends = (begin if begin else -1), (end if sides.behind else end + 1)
    marks = [0 if last > starts and first < ends else NOT_TEXT for first, last in tokens.spans]
    if 0 not in marks:
        return None
    shift = part[0] - begin
    spans = [
        (max(first, begin) + shift, min(last, end) + shift)
        for (first, last), mark in zip(tokens.spans, marks, strict=True)
        if mark == 0
    ]
    if sides.slot is not None:
        marks[tokens.spans.index(sides.slot)] = PREPENDED
    marked = [(0 if mark == PREPENDED else token, mark) for token, mark in zip(tokens.ids, marks, strict=True)]
    return _Row([*frame.before, *sides.split_off, *marked, *frame.after], spans)


def _in_pieces(frame: Frame, tokens: Tokens) -> _Row:
    """The row of a text whose tokens stand in every slot, between literals that were tokenised on their own."""
    marked = [*frame.prompt, *frame.literals[0]]
    for copy, literal in enumerate(frame.literals[1:]):
        marked += [*((token, copy) for token in tokens.ids), *literal]
    return _Row([*frame.before, *marked, *frame.after], tokens.spans)


def _layout(rows: Sequence[_Row]) -> Layout:
    """The rows as tensors, padded on the right."""
    lengths = [len(row.marked) for row in rows]
    # By way of NumPy: PyTorch takes ten times as long for a tensor of a list of lists of pairs.
    flat = chain.from_iterable(chain.from_iterable(row.marked for row in rows))
    marked = np.fromiter(flat, np.int64, 2 * sum(lengths)).reshape(-1, 2)
    real = np.arange(max([1, *lengths])) < np.array(lengths)[:, None]
    ids, marks = np.zeros(real.shape, np.int64), np.full(real.shape, NOT_TEXT, np.int64)
    ids[real], marks[real] = marked.T
    tensors = map(torch.from_numpy, (ids, real, marks))
    return Layout(*tensors, spans=[row.spans for row in rows])


def _not_text(ids: Sequence[int]) -> list[Marked]:
    return [(token, NOT_TEXT) for token in ids]
