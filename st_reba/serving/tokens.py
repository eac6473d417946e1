"""Tokens of texts: how many there are, and which text they stand for. It runs beside the model's thread."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

# What a text is cut to at first, for each token that the model reads; twice as much while that is too little.
_CHARACTERS = 8
# Tokens behind those that the model reads. A cut changes the tokens that stand before it, at most those of one word:
# WordPiece takes one of more than 100 characters for unknown.
_BEHIND = 256
#: Characters of a text that are tokenised to find out which the model reads; more only if 8 for each of its tokens are.
CHARACTERS = 2**20


class OwnTokenizer:
    """A tokenizer of its own: one cannot be used by two threads while one of them sets how it truncates.

    Args:
        tokenizer: Transformers', or a bare one of ``tokenizers``, as ST's ``StaticEmbedding`` has.
    """

    def __init__(self, tokenizer: Any) -> None:
        inner: Any = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
        self._fast = isinstance(inner, Tokenizer)
        self._from_end = getattr(tokenizer, "truncation_side", "right") == "left"
        self._tokenizer: Any = copy.deepcopy(inner if self._fast else tokenizer)
        if self._fast:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, whole, without special tokens."""
        if self._fast:
            return [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        return [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    def cut(self, text: str, limit: int | None, count_all: bool = False) -> tuple[str, int]:
        """What of a text decides the tokens that a model reads, and how many tokens that has.

        A tokenizer reads a text as a whole before it cuts it, and needs a second for a million characters. So only a
        part is tokenised, and a larger one where that has too few tokens: tokenizers may drop any number of characters,
        such as blanks. The first ``limit`` tokens of the part are those of the text, but for a text whose tokens depend
        on characters more than 256 tokens behind them.

        Args:
            text: The text.
            limit: Tokens that the model reads of it; None: all.
            count_all: Whether the tokens behind those are to be counted, too, in a text of up to :data:`CHARACTERS`.

        Raises:
            ValueError: If a text is longer than :data:`CHARACTERS`, and so many have fewer tokens than are read.
        """
        if limit is None:
            if len(text) > CHARACTERS:
                raise ValueError(
                    f"has {len(text):,} characters, and the model reads all of them: send it in parts of at most "
                    f"{CHARACTERS:,}"
                )
            return text, len(self.ids([text])[0])
        wanted = limit + _BEHIND
        size = _CHARACTERS * wanted
        part = self._part(text, max(size, CHARACTERS) if count_all else size)
        while True:
            count = len(self.ids([part])[0])
            if len(part) == len(text) or count >= wanted:
                return part, count
            if len(part) >= CHARACTERS:
                raise ValueError(
                    f"has {len(text):,} characters, and {len(part):,} of them have fewer tokens than the model reads, "
                    "which is as far as the server looks: send it in parts"
                )
            part = self._part(text, 2 * len(part))

    def _part(self, text: str, size: int) -> str:
        return text[-size:] if self._from_end else text[:size]

    def text(self, ids: Sequence[int], limit: int | None = None) -> str:
        """The text that tokens stand for; the special tokens at its ends are left out, as the model adds its own.

        Args:
            ids: The tokens.
            limit: How many of them the model reads; None: all. Of more, those that decide these are taken.

        Raises:
            ValueError: If one is no token, or the tokens are not those of that text: the model reads texts, and would
                read other tokens than were sent.
        """
        size = self._tokenizer.get_vocab_size(with_added_tokens=True) if self._fast else len(self._tokenizer)
        for index, own in enumerate(ids):
            if not 0 <= own < size:
                raise ValueError(
                    f"token {index} is {own if abs(own) < 10**9 else 'huge'}, and the vocabulary has {size}"
                )
        begin, end = 0, len(ids)
        while begin < end and ids[begin] in self._special:
            begin += 1
        while begin < end and ids[end - 1] in self._special:
            end -= 1
        inner = list(ids[begin:end])
        checked = slice(None)
        if limit is not None and len(inner) > limit + _BEHIND:
            # The last token that is kept may be a part of a character.
            if self._from_end:
                inner = inner[-limit - _BEHIND :]
                checked = slice(_BEHIND, None)
            else:
                inner, checked = inner[: limit + _BEHIND], slice(limit)
        text: str = self._tokenizer.decode(inner, skip_special_tokens=False)
        if self.ids([text])[0][checked] != inner[checked]:
            raise ValueError("these are not the tokens that the model's own tokenizer makes of any text")
        return text
