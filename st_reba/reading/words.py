"""Embeddings of words in their sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base import BaseModel
from torch import Tensor

from ..modules import CausalModule
from ..text.presets import normalized
from ..text.tokens import Span, Tokens, tokenize

# Number of batches whose token embeddings are in memory at once.
_BATCHES = 8


def encode_words(
    model: BaseModel, sentences: Sequence[str], words: Sequence[str], *, batch_size: int = 32
) -> np.ndarray:
    """Return the embedding of one word in each sentence: the mean of its tokens' embeddings.

    The tokens of a word are all tokens that contain a character of its first occurrence. The model's default prompt is
    put before each sentence, as in ``encode``.

    Args:
        model: A model whose first module is one of st_reba's and returns one vector per token of the text.
        sentences: B sentences.
        words: B words, one for each sentence.
        batch_size: Number of sentences per batch.

    Returns:
        Embeddings (B, D), float32.

    Raises:
        ValueError: If there are no sentences, a word does not occur in its sentence or was truncated, or the model does
            not return one vector per token.
    """
    module = model[0]
    if not isinstance(module, CausalModule):
        raise ValueError(f"The model's first module is {type(module).__name__}: words need a module of st_reba.")
    if len(sentences) != len(words) or not sentences:
        raise ValueError(f"{len(sentences)} sentences and {len(words)} words: give sentences with one word each.")
    prompt = model.prompts.get(model.default_prompt_name or "")
    word_tokens = [_tokens_of_word(module, *pair, prompt) for pair in zip(sentences, words, strict=True)]
    vectors = []
    # A few batches at a time, because a token's vector is as large as a sentence's.
    for start in range(0, len(sentences), _BATCHES * batch_size):
        part = slice(start, start + _BATCHES * batch_size)
        encoded = cast(SentenceTransformer, model).encode(
            list(sentences[part]), output_value="token_embeddings", batch_size=batch_size, show_progress_bar=False
        )
        # The overloads of encode do not have this return type, a list of tensors.
        for states, (indices, count) in zip(cast(Sequence[Tensor], encoded), word_tokens[part], strict=True):
            if len(states) != count:
                raise ValueError(
                    f"The model returns {len(states)} vectors for {count} tokens of a sentence. Words need "
                    'pool_over="text", and pool_copies="last" or rows="all" if the module has such a setting.'
                )
            vectors.append(states[indices].float().mean(dim=0).cpu())
    return torch.stack(vectors).numpy()


def _tokens_of_word(module: CausalModule, sentence: str, word: str, prompt: str | None) -> tuple[list[int], int]:
    """Return the indices of the tokens with a character of a word, and the number of tokens of its sentence."""
    start = sentence.find(word) if word else -1
    if start < 0:
        raise ValueError(f"The word {word!r} does not occur in {sentence!r}.")
    offsets = token_offsets(module, sentence, prompt)
    indices = [index for index, (first, last) in enumerate(offsets) if first < start + len(word) and last > start]
    if not indices:
        raise ValueError(f"{word!r} was truncated: {sentence!r} is longer than max_seq_length. Raise the limit.")
    return indices, len(offsets)


def token_offsets(module: CausalModule, text: str, prompt: str | None = None) -> list[Span]:
    """Return the characters of each token of a text, (first, one past the last), truncated as when embedded.

    With ``normalize_text``, the offset of an added mark is one past the end of the text.

    Args:
        module: Module that embeds the text.
        text: The text.
        prompt: Prompt before the text, which may change its first tokens.

    Raises:
        ValueError: If tokens have no vectors, or the tokenizer gives no offsets and its tokens do not spell the text.
    """
    if not module.has_token_vectors:
        raise ValueError(f"{type(module).__name__} has no vectors of tokens. For words use EchoModule or ReBAModule.")
    return _checked(module, module.lay_out([text], prompt or "")[0].spans[0])


def tokens_of(module: CausalModule, texts: Sequence[str]) -> list[Tokens]:
    """Return the tokens of texts as a module reads them, untruncated, without template and special tokens."""
    read = [normalized(text) if module.normalize_text else text for text in texts]
    return tokenize(module.layouter.tokenizer, read)


def untruncated_offsets(module: CausalModule, texts: Sequence[str]) -> list[list[Span]]:
    """Return the characters of each token of untruncated texts, without template and added marks.

    Raises:
        ValueError: If the tokenizer gives no offsets and its tokens do not spell the text.
    """
    offsets = []
    for text, tokens in zip(texts, tokens_of(module, texts), strict=True):
        spans = [(first, min(last, len(text))) for first, last in _checked(module, tokens.spans)]
        offsets.append([(first, last) for first, last in spans if first < last])
    return offsets


def _checked(module: CausalModule, spans: list[Span] | None) -> list[Span]:
    if spans is None:
        raise ValueError(f"{type(module.tokenizer).__name__} gives no offsets of its tokens. Use a fast tokenizer.")
    return spans
