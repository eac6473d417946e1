"""Vectors of words in their sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base import BaseModel
from torch import Tensor

from ..modules import CausalModule
from ..text.tokens import Span

# Batches that are encoded before their words are read off and their tokens let go.
_BATCHES = 8


class WordTokens(NamedTuple):
    """Where a word stands among the tokens of its sentence.

    Attributes:
        indices: The tokens that hold any character of it.
        length: How many tokens the sentence has.
    """

    indices: list[int]
    length: int


def encode_words(
    model: BaseModel,
    sentences: Sequence[str],
    words: Sequence[str],
    *,
    batch_size: int = 32,
) -> np.ndarray:
    """The embedding of one word in each sentence: the mean of its tokens' embeddings.

    A word is found by its characters, at its first occurrence; a token that holds any of them belongs to it. A default
    prompt of the model stands before each sentence, as in ``encode``.

    Args:
        model: A model whose first module is one of st_reba's and hands on one vector for each token of the text.
        sentences: B sentences.
        words: B words, one for each sentence.
        batch_size: Sentences at a time.

    Returns:
        (B, D), float32.

    Raises:
        ValueError: If there are no sentences, or a word does not occur in its sentence, or was truncated away, or the
            model does not hand on one vector a token.
    """
    module = model[0]
    if not isinstance(module, CausalModule):
        raise ValueError(f"The model's first module is {type(module).__name__}: words need one of st_reba's modules.")
    found = find_words(module, sentences, words, prompt=model.prompts.get(model.default_prompt_name or ""))
    vectors = []
    # A few batches at a time, because a token's vector is as large as a sentence's.
    for start in range(0, len(sentences), _BATCHES * batch_size):
        part = slice(start, start + _BATCHES * batch_size)
        tokens = cast(SentenceTransformer, model).encode(
            list(sentences[part]), output_value="token_embeddings", batch_size=batch_size, show_progress_bar=False
        )
        # A list with a tensor for each sentence, which sentence-transformers' overloads do not say.
        vectors.append(pool_words(cast(Sequence[Tensor], tokens), found[part]).cpu())
    return torch.cat(vectors).numpy()


def find_words(
    module: CausalModule, sentences: Sequence[str], words: Sequence[str], prompt: str | None = None
) -> list[WordTokens]:
    """Which tokens of each sentence hold its word: its first occurrence, by characters.

    Args:
        module: Whose tokenizer and truncation count.
        sentences: B sentences.
        words: B words, one for each sentence.
        prompt: What stands before each sentence.

    Raises:
        ValueError: If a word does not occur in its sentence, or was truncated away, or there are not as many words as
            sentences.
    """
    if len(sentences) != len(words) or not sentences:
        raise ValueError(f"{len(sentences)} sentences and {len(words)} words: give one word a sentence, at least one.")
    found = []
    for sentence, word in zip(sentences, words, strict=True):
        start = sentence.find(word) if word else -1
        if start < 0:
            raise ValueError(f"The word {word!r} does not occur in {sentence!r}.")
        offsets = token_offsets(module, sentence, prompt)
        indices = [index for index, (first, last) in enumerate(offsets) if first < start + len(word) and last > start]
        if not indices:
            raise ValueError(f"{word!r} was truncated away: {sentence!r} is longer than max_seq_length.")
        found.append(WordTokens(indices, len(offsets)))
    return found


def token_offsets(module: CausalModule, text: str, prompt: str | None = None) -> list[Span]:
    """Where each token of a text lies in it, (first character, one past the last), truncated as when embedded.

    With ``normalize_text``, a mark that was added lies one past the text's end.

    Args:
        module: What embeds it.
        text: The text.
        prompt: What stands before it: the tokens at its beginning may depend on it.

    Raises:
        ValueError: If tokens have no vectors of their own, or the tokenizer does not say where its tokens lie, and they
            do not spell the text.
    """
    if module.no_words:
        raise ValueError(f"{type(module).__name__} {module.no_words}. For words use EchoModule or ReBAModule.")
    return _located(module, module.lay_out([text], prompt).spans[0])


def own_offsets(module: CausalModule, texts: Sequence[str]) -> list[list[Span]]:
    """Where each of a text's own tokens lies in it, whole, without what stands around it or is added to it.

    Raises:
        ValueError: If the tokenizer does not say where its tokens lie, and they do not spell the text.
    """
    return [
        [(first, min(last, len(text))) for first, last in _located(module, own.spans) if first < min(last, len(text))]
        for text, own in zip(texts, module.tokenized(texts), strict=True)
    ]


def _located(module: CausalModule, spans: list[Span] | None) -> list[Span]:
    if spans is None:
        raise ValueError(f"{type(module.tokenizer).__name__} does not say where its tokens lie: use a fast tokenizer.")
    return spans


def pool_words(token_embeddings: Sequence[Tensor], found: Sequence[WordTokens]) -> Tensor:
    """The mean of each word's token embeddings.

    Args:
        token_embeddings: B of (n_i, D), as ``encode(output_value="token_embeddings")`` gives them.
        found: What :func:`find_words` says about the B sentences.

    Returns:
        (B, D), float32, on the device of the embeddings.

    Raises:
        ValueError: If the embeddings are not one for each token of the sentence.
    """
    vectors = []
    for tokens, word in zip(token_embeddings, found, strict=True):
        if len(tokens) != word.length:
            raise ValueError(
                f"The model hands on {len(tokens)} vectors for {word.length} tokens of a sentence: words need "
                'pool_over="text", and pool_copies="last" or rows="all" where there is such a setting.'
            )
        vectors.append(tokens[word.indices].float().mean(dim=0))
    return torch.stack(vectors)
