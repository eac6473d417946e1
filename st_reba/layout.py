"""Text to token ids: how often a text stands in the input, and which copy each token belongs to.

Nothing here knows a model or a method. A template such as ``"{text}{text}"`` and a batch of texts become a
:class:`Layout`; every readout of every method is then a question about ``Layout.copy_index``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from .templates import TEMPLATES

SLOT = "{text}"

# A final mark that closes a sentence as the prompts expect it, and what stands in for the quotation marks that are the
# template's own.
_ENDS = ".?\"'。？”’"
_QUOTES = str.maketrans('"“”', "'‘’")
_QUESTIONS = {"?": ".", "？": "。"}

NOT_TEXT = -1

#: What token prepending writes where a vector of its own enters.
PREPEND = "{prepend}"
#: The ``copy_index`` of such a slot; that of a text's second block is one less, and so on.
PREPENDED = -2


def normalized(text: str) -> str:
    """A text as the prompts of the PromptEOL family expect it, as their released code does.

    A text whose last character is none of ``. ? ' "`` gets a final ``.``; every ``"`` becomes ``'``; a final ``?`` then
    becomes ``.``. Chinese is treated alike: its full stop, question mark and quotation marks count as theirs do, and a
    text that ends in an ideograph or a full-width mark gets its full stop. A text of nothing but blanks stays as it is.

    Every replacement is one character for one, and what is added is at the end: a character keeps its place.
    """
    if not text.strip():
        return text
    if text[-1] not in _ENDS:
        text += "。" if _is_chinese(text[-1]) else "."
    text = text.translate(_QUOTES)
    return text[:-1] + _QUESTIONS.get(text[-1], text[-1])


def _is_chinese(character: str) -> bool:
    """Whether it is an ideograph or a full-width mark."""
    if unicodedata.category(character)[0] == "P":
        return unicodedata.east_asian_width(character) in "WF"
    return unicodedata.name(character, "").startswith("CJK ")


def in_context(sentence: str, condition: str) -> dict[str, str]:
    """A sentence and its condition as BeLLM words it for the template ``csts``: a prompt of the sentence's own.

    The modules of this package embed such inputs, in one batch and whatever their prompts:
    ``model.encode([in_context(sentence, condition), ...])``.

    Returns:
        ``{"prompt": "Given the context ..., ", "text": sentence}``.
    """
    return {"prompt": f"Given the context {condition}, ", "text": sentence}


@dataclass(frozen=True)
class Template:
    """The literal parts around the slots: ``literals[i]`` stands before copy ``i``, the last one at the end."""

    literals: tuple[str, ...]

    @classmethod
    def parse(cls, template: str, *, prepends: bool = False) -> Template:
        """Read a template string or the name of one in :data:`st_reba.TEMPLATES`.

        ``{text}`` is the only thing that is not literal. ``str.format`` is never called, because a template may come
        from a configuration file that somebody else wrote.

        Args:
            template: The string or name.
            prepends: Whether there must be one ``{prepend}`` before the text too: it stays part of its literal.

        Raises:
            ValueError: If there is no ``{text}``, or any other brace.
        """
        if not isinstance(template, str):
            raise ValueError(f"template must be a string, but {template!r} was given.")
        literals = TEMPLATES.get(template, template).split(SLOT)
        allowed = f"A template is text with {SLOT} where the input goes, or one of {sorted(TEMPLATES)}."
        if len(literals) == 1:
            raise ValueError(f"The template {template!r} has no {SLOT}. {allowed}")
        if prepends and (literals[0].count(PREPEND) != 1 or any(PREPEND in literal for literal in literals[1:])):
            raise ValueError(
                f"The template {template!r} must have one {PREPEND}, and have it before {SLOT}: there the slot stands."
            )
        plain = [literals[0].replace(PREPEND, "") if prepends else literals[0], *literals[1:]]
        if any(brace in literal for literal in plain for brace in "{}"):
            raise ValueError(f"The template {template!r} has braces other than {SLOT}. {allowed} Remove the others.")
        return cls(tuple(literals))

    @classmethod
    def repeat(cls, copies: int) -> Template:
        """``copies`` copies of the text and nothing else."""
        return cls(("",) * (copies + 1))

    @property
    def copies(self) -> int:
        """How often the text stands in the layout."""
        return len(self.literals) - 1

    def __str__(self) -> str:
        return SLOT.join(self.literals)


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

    def rows(self, texts: slice | Tensor) -> Layout:
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


#: A token's id and what :attr:`Layout.copy_index` says of it.
Marked = tuple[int, int]

_Token = TypeVar("_Token")


class LayoutBuilder:
    """Turns texts into layouts, for one template and one tokenizer.

    Args:
        template: What stands around and between the copies.
        tokenizer: Any Hugging Face tokenizer. Its padding side, padding token and chat template do not matter.
        end: Whether each layout must end in the tokenizer's end-of-sequence token, added where it adds none itself.

    Raises:
        ValueError: If there is no token to end with.
    """

    def __init__(self, template: Template, tokenizer: PreTrainedTokenizerBase, end: bool = False) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.literals = [self._marked(literal) for literal in template.literals]
        self.specials_before, self.specials_after = special_tokens(tokenizer)
        eos = tokenizer.eos_token_id
        if end and not self.specials_after and eos is None:
            raise ValueError(f"{type(tokenizer).__name__} has no end-of-sequence token: set tokenizer.eos_token.")
        if end and eos is not None and self.specials_after[-1:] != [eos]:
            self.specials_after = [*self.specials_after, eos]

    def overhead(self, prompt: str | None = None) -> int:
        """Tokens of a layout that are not text: special tokens, literals and the prompt."""
        literals = sum(map(len, self.literals))
        return len(self.specials_before) + len(self._ids(prompt or "")) + literals + len(self.specials_after)

    def room(self, positions: int, prompt: str | None = None) -> int:
        """How many tokens one copy may have if the whole layout is to fit ``positions``; less than 1 if none."""
        return (positions - self.overhead(prompt)) // self.template.copies

    def tokenize(self, texts: Sequence[str], max_tokens: int | None) -> list[list[int]]:
        """The token ids of each text, without special tokens, at most ``max_tokens`` of them."""
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [truncated(ids, max_tokens, self.tokenizer) for ids in encoded["input_ids"]]

    def build(self, texts: Sequence[str], *, max_tokens: int | None, prompt: str | None = None) -> Layout:
        """Lay out a batch of texts.

        Each text is tokenised once and its ids stand in every slot, so all copies are the same, token for token, and
        truncated alike. Special tokens stand once, at the two ends; the prompt once, behind the leading ones.
        """
        return self.arrange(self.tokenize(texts, max_tokens), prompt)

    def arrange(self, texts: Sequence[Sequence[int]], prompt: str | None = None) -> Layout:
        """The same for texts that are token ids already."""
        return self._framed([self._body(ids) for ids in texts], prompt)

    def _framed(self, bodies: Sequence[list[Marked]], prompt: str | None) -> Layout:
        before = _not_text([*self.specials_before, *self._ids(prompt or "")])
        after = _not_text(self.specials_after)
        rows = [[*before, *body, *after] for body in bodies]
        length = max(1, *map(len, rows))
        table = torch.tensor([row + [(0, NOT_TEXT)] * (length - len(row)) for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        attention_mask = (torch.arange(length) < lengths[:, None]).long()
        return Layout(table[..., 0].contiguous(), attention_mask, table[..., 1].contiguous())

    def _body(self, ids: Sequence[int]) -> list[Marked]:
        """The copies of a text and the literals around them."""
        body = [*self.literals[0]]
        for copy, literal in enumerate(self.literals[1:]):
            body += [*((token, copy) for token in ids), *literal]
        return body

    def _marked(self, literal: str) -> list[Marked]:
        first, *others = (_not_text(self._ids(part)) for part in literal.split(PREPEND))
        return [*first, *(item for part in others for item in ((0, PREPENDED), *part))]

    def _ids(self, literal: str) -> list[int]:
        return self.tokenize([literal], None)[0] if literal else []


def _not_text(ids: Sequence[int]) -> list[Marked]:
    return [(token, NOT_TEXT) for token in ids]


def truncated(tokens: list[_Token], max_tokens: int | None, tokenizer: PreTrainedTokenizerBase) -> list[_Token]:
    """At most so many tokens, from the side that the tokenizer leaves whole.

    A fast tokenizer that is asked to truncate keeps that as its state, and another thread may change it before it is
    used: a text is then cut as that thread's are, or not at all.
    """
    if max_tokens is None or len(tokens) <= max_tokens:
        return tokens
    return tokens[len(tokens) - max_tokens :] if tokenizer.truncation_side == "left" else tokens[:max_tokens]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids a tokenizer puts before and after a text of its own accord, e.g. ``([CLS], [SEP])``.

    Raises:
        ValueError: If the tokenizer reads a text differently with and without special tokens.
    """
    sample = "a"
    plain = tokenizer(sample, add_special_tokens=False)["input_ids"]
    full = tokenizer(sample)["input_ids"]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    raise ValueError(
        f"{type(tokenizer).__name__} reads {sample!r} as {full} with special tokens and as {plain} without: special "
        "tokens cannot be told from the text. Use a tokenizer that only adds tokens at the two ends."
    )
