"""Tokens of words."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

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
            pairs = zip(tokens.ids, tokens.spans, strict=True)
            ids[word] = [token for token, (start, end) in pairs if start >= len(QUOTE) and end > start]
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
