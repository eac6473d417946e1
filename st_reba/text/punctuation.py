"""The entries of a vocabulary that are nothing but punctuation."""

from __future__ import annotations

import string
import unicodedata
from typing import cast

from transformers import PreTrainedTokenizerBase


def punctuation_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The tokens that stand for punctuation and blanks alone, as the vocabulary writes them, in the order of their ids.

    Those are more than the marks themselves: ``" ("``, ``"),"`` and ``"..."`` are one token each to many a tokenizer.
    Punctuation is what Unicode calls so in any language, and what :data:`string.punctuation` has besides, such as
    ``"$"``.
    """
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    ids = sorted(token for token in vocabulary.values() if token not in special)
    texts = tokenizer.batch_decode([[token] for token in ids])
    marks = [token for token, text in zip(ids, texts, strict=True) if all(map(_tells_nothing, text))]
    return cast("list[str]", tokenizer.convert_ids_to_tokens(marks))


def _tells_nothing(character: str) -> bool:
    return character.isspace() or character in string.punctuation or unicodedata.category(character).startswith("P")
