"""Tokens of words and punctuation, and the number of texts in which a token occurs."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .tokens import tokenize

_WORD = re.compile(r"\w+")
#: Mark before the word that a prompt asks for.
QUOTE = '"'

# English words without a topic.
_ENGLISH = """
    a about above after again against all am an and any are as at be because been before being below between both but
    by can cannot could did do does doing down during each few for from further had has have having he her here hers
    herself him himself his how i if in into is it its itself just me more most my myself no nor not now of off on once
    only or other our ours ourselves out over own same she should so some such than that the their theirs them
    themselves then there these they this those through to too under until up very was we were what when where which
    while who whom why will with would you your yours yourself yourselves s t d ll m re ve
"""
STOP_WORDS = tuple(_ENGLISH.split())


def words_of(text: str, stop_words: Collection[str] = ()) -> list[str]:
    """Return the different words of a text, in lower case and order, without punctuation and stop words."""
    return [word for word in dict.fromkeys(_WORD.findall(text.lower())) if word not in stop_words]


def word_token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], stop_words: Collection[str] = ()
) -> list[list[int]]:
    """Return, for each text, the different tokens of its words right behind a quotation mark.

    Args:
        tokenizer: Tokenizer of the model.
        texts: B strings.
        stop_words: Words that are left out.
    """
    words = [words_of(text, stop_words) for text in texts]
    every = list(dict.fromkeys(word for own in words for word in own))
    ids: dict[str, list[int]] = {}
    for word, tokens in zip(every, tokenize(tokenizer, [QUOTE + word for word in every]), strict=True):
        if tokens.spans is None:
            # No offsets: take the tokens of the word alone.
            ids[word] = tokenize(tokenizer, [word])[0].ids
        else:
            # A token that holds the mark too cannot follow it.
            ids[word] = [
                token
                for token, (start, end) in zip(tokens.ids, tokens.spans, strict=True)
                if start >= len(QUOTE) and end > start
            ]
    return [list(dict.fromkeys(token for word in own for token in ids[word])) for own in words]


def lower_case_tokens(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> list[int]:
    """Return the tokens that can begin a word behind a quotation mark: lower-case letters of any script, no blank."""
    special = set(tokenizer.all_special_ids)
    found = []
    for token in range(min(vocabulary, len(tokenizer))):
        piece = str(tokenizer.convert_ids_to_tokens(token))
        # Blanks of byte-level tokenizers and SentencePiece, and parts of characters, do not decode to themselves.
        if token not in special and piece.isalpha() and piece == piece.lower() == str(tokenizer.decode([token])):
            found.append(token)
    return found


def punctuation_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens of punctuation and blanks alone, as the vocabulary writes them, in the order of their ids.

    These include ``" ("``, ``"),"`` and ``"..."``, which many tokenizers have as one token. Punctuation is Unicode's of
    any language, and :data:`string.punctuation`, such as ``"$"``.
    """
    special = set(tokenizer.all_special_ids)
    ids = sorted(token for token in tokenizer.get_vocab().values() if token not in special)
    texts = tokenizer.batch_decode([[token] for token in ids])
    marks = [token for token, text in zip(ids, texts, strict=True) if all(map(_is_mark_or_blank, text))]
    return cast("list[str]", tokenizer.convert_ids_to_tokens(marks))


def _is_mark_or_blank(character: str) -> bool:
    return character.isspace() or character in string.punctuation or unicodedata.category(character).startswith("P")


class DocumentFrequencies:
    """Number of texts in which each token id occurs. The texts are not kept.

    Attributes:
        texts: N, number of texts with tokens.
        counts: (V,), number of texts that have each token.
    """

    def __init__(self, vocabulary_size: int) -> None:
        self.texts = 0
        self.counts = torch.zeros(vocabulary_size, dtype=torch.int64)

    def add(self, texts: Tensor, ids: Tensor) -> None:
        """Count the tokens of some whole texts.

        Args:
            texts: (T,), number of each token's text among these.
            ids: (T,), token ids.
        """
        size = len(self.counts)
        # Each token once for each text.
        pairs = (texts * size + ids).unique()
        self.counts += torch.bincount(pairs % size, minlength=size)
        self.texts += len(texts.unique())

    @property
    def idf(self) -> Tensor:
        r"""(V,), float64: :math:`\ln \frac{1 + N}{1 + df} + 1`, the smooth form that scikit-learn uses.

        A token that is in every text has 1.
        """
        return torch.log((1 + self.texts) / (1 + self.counts.double())) + 1
