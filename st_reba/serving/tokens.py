"""Tokens of texts: how many there are, and which text they stand for. It runs beside the model's thread."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer


class Tokens:
    """A tokenizer of its own: one cannot be used by two threads while one of them sets how it truncates.

    Args:
        tokenizer: Transformers', or a bare one of ``tokenizers``, as ST's ``StaticEmbedding`` has.
    """

    def __init__(self, tokenizer: Any) -> None:
        inner: Any = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
        self._fast = isinstance(inner, Tokenizer)
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

    def text(self, ids: Sequence[int]) -> str:
        """The text that tokens stand for; the special tokens at its ends are left out, as the model adds its own.

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
        text: str = self._tokenizer.decode(inner, skip_special_tokens=False)
        if self.ids([text])[0] != inner:
            raise ValueError("these are not the tokens that the model's own tokenizer makes of any text")
        return text
