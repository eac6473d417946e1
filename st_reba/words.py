"""Vectors of words in their sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base import BaseModel

from .modules import CausalModule


def encode_words(
    model: BaseModel,
    sentences: Sequence[str],
    words: Sequence[str],
    *,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> np.ndarray:
    """The embedding of one word in each sentence: the mean of its tokens' embeddings.

    A word is found by its characters, at its first occurrence; a token that holds any of them belongs to it.

    Args:
        model: A model whose first module is one of st_reba's and hands on one vector for each token of the text.
        sentences: B sentences.
        words: B words, one for each sentence.
        batch_size: Sentences at a time.
        show_progress_bar: As in ``model.encode``.

    Returns:
        (B, D), float32.

    Raises:
        ValueError: If a word does not occur in its sentence, or was truncated away, or the model does not hand on one
            vector a token.
    """
    if len(sentences) != len(words):
        raise ValueError(f"{len(sentences)} sentences and {len(words)} words were given: give one word a sentence.")
    module = model[0]
    if not isinstance(module, CausalModule):
        raise ValueError(f"The model's first module is {type(module).__name__}: words need one of st_reba's modules.")
    spans = [_span(sentence, word) for sentence, word in zip(sentences, words, strict=True)]
    embeddings = cast(SentenceTransformer, model).encode(
        list(sentences),
        output_value="token_embeddings",
        batch_size=batch_size,
        show_progress_bar=show_progress_bar,
    )
    vectors = []
    for sentence, word, (start, end), tokens in zip(sentences, words, spans, embeddings, strict=True):
        offsets = module.token_offsets(sentence)
        if len(offsets) != len(tokens):
            raise ValueError(
                f"{type(module).__name__} hands on {len(tokens)} vectors for {len(offsets)} tokens of {sentence!r}: "
                'words need pool_over="text", and pool_copies="last" or rows="all" where there is such a setting.'
            )
        own = [index for index, (first, last) in enumerate(offsets) if first < end and last > start]
        if not own:
            raise ValueError(f"{word!r} was truncated away: {sentence!r} is longer than max_seq_length.")
        vectors.append(tokens[own].float().mean(dim=0))
    return torch.stack(vectors).cpu().numpy()


def _span(sentence: str, word: str) -> tuple[int, int]:
    start = sentence.find(word) if word else -1
    if start < 0:
        raise ValueError(f"The word {word!r} does not occur in {sentence!r}.")
    return start, start + len(word)
