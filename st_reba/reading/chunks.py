"""Embeddings of chunks in the context of their document (late chunking)."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from ..modules import CausalModule, KVReroutingModule
from ..modules.vectors import ONE_BY_ONE, TokenVectors
from ..settings import check_int, first_not_none
from ..text.layout import Layout
from ..text.tokens import Span
from .words import token_offsets, untruncated_offsets

# A part of a text may have a few more tokens alone than within the text.
_SLACK = 8

# Windows, as index of the text and characters, with the indices and characters of their chunks.
_Windows = dict[tuple[int, Span], dict[int, Span]]
# States (n, D) and ids (n,) of tokens.
_Tokens = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DocumentChunks:
    """Chunks of a text.

    Attributes:
        spans: Characters of each chunk: the first, and one past the last.
        vectors: Embeddings (chunks, D), float32.
    """

    spans: list[Span]
    vectors: np.ndarray


def encode_chunks(
    model: SentenceTransformer,
    texts: Sequence[str],
    *,
    chunk_tokens: int,
    overlap: int = 0,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_size: int = 32,
    truncate_dim: int | None = None,
    normalize_embeddings: bool = False,
) -> list[DocumentChunks]:
    r"""Return an embedding of each chunk of each text, in the context of the whole text.

    .. math:: e_C = f\left( \{ v_i : i \in C \} \right)

    (Guenther et al., "Late Chunking".) The model reads the whole text once; :math:`v_i` are the token vectors of its
    first module, and f is the rest of the model: pooling, normalization, filters. Special tokens at either end of the
    text belong to its first or last chunk. The embedding of a single chunk is that of ``model.encode``.

    A text that exceeds the model's limit is read in windows that overlap by half. A chunk is read in the first window
    that contains all of it, or else in a window that ends with it.

    Args:
        model: A model whose first module is one of st_reba's and returns one vector per token of the text.
        texts: The documents.
        chunk_tokens: Number of tokens per chunk; the last chunk may have fewer, and a character of several tokens is
            not divided.
        overlap: Number of tokens that consecutive chunks share, less than ``chunk_tokens``. It is smaller if the next
            character has several tokens and would not fit.
        prompt_name: Name of one of the model's prompts; None: its default prompt.
        prompt: Prompt before every text and every window.
        batch_size: Number of texts or windows per forward pass, and of chunks per pooling.
        truncate_dim: Number of first values of a vector to keep; None: the model's setting.
        normalize_embeddings: Whether to scale vectors to length 1, after truncation.

    Returns:
        Chunks of each text, in order. A text without tokens has none.

    Raises:
        ValueError: If a setting cannot be used, or the model has no token vectors.
    """
    check_chunk_tokens(chunk_tokens, overlap)
    check_int("batch_size", batch_size, 1)
    texts = texts if isinstance(texts, str) else [*texts]
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ValueError("texts is one string, or has something else than strings: give a list of texts.")
    if prompt is None and prompt_name not in (None, *model.prompts):
        names = ", ".join(map(repr, model.prompts)) or "none"
        raise ValueError(f"prompt_name={prompt_name!r}: the model has {names}. Or give the prompt in full.")
    prompt = first_not_none(prompt, model.prompts.get(prompt_name or model.default_prompt_name or ""), "")
    reader = _reader(model)
    spans: list[list[Span]] = []
    windows: _Windows = {}
    numbers = count()
    for index, (text, offsets) in enumerate(zip(texts, untruncated_offsets(reader, texts), strict=True)):
        chunks = _cut(offsets, chunk_tokens, overlap)
        spans.append([(offsets[first][0], offsets[last - 1][1]) for first, last in chunks])
        for part, span in zip(_parts(reader, text, offsets, chunks, prompt), spans[-1], strict=True):
            windows.setdefault((index, part), {})[next(numbers)] = span
    width = model.get_embedding_dimension() or 0
    dimension = truncate_dim or model.truncate_dim
    order: list[int] = []
    batches = [np.zeros((0, min(width, dimension or width)), np.float32)]
    # Longest first, as in encode.
    longest = sorted(windows.items(), key=lambda window: window[0][1][0] - window[0][1][1])
    model.eval().to(model.device)
    with torch.inference_mode():
        for start in range(0, len(longest), batch_size):
            tokens = _read(reader, texts, dict(longest[start : start + batch_size]), prompt)
            for first in range(0, len(tokens), batch_size):
                vectors = _pool(model, reader, list(tokens.values())[first : first + batch_size])[:, :dimension]
                batches.append((normalize(vectors, dim=1) if normalize_embeddings else vectors).float().cpu().numpy())
            order += tokens
    ordered = np.concatenate(batches[1:] or batches)[np.argsort(order)]
    by_text = np.split(ordered, np.cumsum(list(map(len, spans))))[:-1]
    return [DocumentChunks(*chunks) for chunks in zip(spans, by_text, strict=True)]


def check_chunk_tokens(chunk_tokens: int, overlap: int) -> None:
    """Check the size and the overlap of chunks.

    Raises:
        ValueError: If the size is below 1, or the overlap is not below the size.
    """
    if type(chunk_tokens) is not int or type(overlap) is not int or not 0 <= overlap < chunk_tokens:
        raise ValueError(
            f"chunk_tokens={chunk_tokens!r}, overlap={overlap!r}: give at least 1 token per chunk, and an overlap from "
            "0 to fewer tokens than a chunk has."
        )


def _reader(model: SentenceTransformer) -> CausalModule:
    """Return a copy of the model's first module that returns all tokens of a text."""
    module = model[0]
    if not isinstance(module, CausalModule):
        raise ValueError(f"The model's first module is {type(module).__name__}: chunks need a module of st_reba.")
    after = module.layouter.templates[0].literals[-1]
    reason = ""
    if not module.has_token_vectors:
        reason = "has no vectors of tokens, so chunks have none."
    elif module.pool_over == "whole":
        reason = 'has pool_over="whole", which includes the prompt: use pool_over="text".'
    elif module.pool_over == "all" and after:
        reason = f'reads the prompt {after!r} after the text, where no chunk is: use pool_over="text" with rows="all".'
    elif len(module.copies_read) > 1:
        reason = 'reads a token in several copies: use pool_copies="last".'
    if reason:
        raise ValueError(f"{type(module).__name__} {reason} Or encode each chunk as a text of its own.")
    reader = copy.copy(module)
    reader.rows = "all"
    if isinstance(reader, KVReroutingModule):
        # It returns all tokens; _pool adds their mean and the last.
        reader.hybrid = False
    return reader


def _cut(offsets: Sequence[Span], length: int, overlap: int) -> list[Span]:
    """Return chunks of at most this many tokens, each as its first token and one past its last."""
    # Chunks begin and end at tokens that begin a character.
    cuts = [index for index, (start, _) in enumerate(offsets) if not index or start >= offsets[index - 1][1]]
    cuts.append(len(offsets))
    chunks: list[Span] = []
    first = last = 0
    while cuts[last] < len(offsets):
        # Each chunk has at least one new character, even if that reduces the overlap or exceeds the length.
        while first < last and cuts[last + 1] - cuts[first] > length:
            first += 1
        last = max(last + 1, bisect_right(cuts, cuts[first] + length) - 1)
        chunks.append((cuts[first], cuts[last]))
        first = max(first + 1, bisect_right(cuts, cuts[last] - overlap) - 1)
    return chunks


def _parts(reader: CausalModule, text: str, offsets: list[Span], chunks: list[Span], prompt: str) -> list[Span]:
    """Return the characters of the text, or of a window, to read for each chunk."""
    limit, count = reader.max_tokens(prompt), len(offsets)
    # In a template the text may have one more token than alone.
    if not chunks or limit is None or (count <= limit and token_offsets(reader, text, prompt)[-1][1] >= offsets[-1][1]):
        return [(0, len(text))] * len(chunks)
    length = max(1, limit - min(_SLACK, limit // 4))
    step = max(1, length // 2)
    parts = []
    for first, end in chunks:
        if end - first > length:
            raise ValueError(f"The model reads {length} tokens of a long text at a time: give chunk_tokens={length}.")
        start = -(-max(0, end - length) // step) * step
        start = min(start if start <= first else end - length, max(0, count - length))
        stop = start + length
        parts.append((offsets[start][0] if start else 0, offsets[stop - 1][1] if stop < count else len(text)))
    return parts


def _read(reader: CausalModule, texts: Sequence[str], windows: _Windows, prompt: str) -> dict[int, _Tokens]:
    """Return the states and ids of the tokens of each chunk of the windows."""
    parts = [texts[index][begin:end] for index, (begin, end) in windows]
    features = reader.preprocess(parts, prompt=prompt)
    layout = Layout.from_features(features)
    # Tokens before the text, usually special tokens.
    before = (layout.copy_index >= 0).cumsum(dim=1) == 0
    leading = (reader.selected(layout) & before).sum(dim=1).tolist()
    output = reader(features)
    counts = output["attention_mask"].sum(dim=1).tolist()
    tokens_of_chunks = {}
    for row, (index, part) in enumerate(windows):
        offsets = token_offsets(reader, parts[row], prompt)
        # Positions in the output at which tokens of the text begin, and the end of the last.
        edges = list(range(leading[row], leading[row] + len(offsets) + 1))
        # Tokens around the text belong to its first and last chunk.
        edges[0] = 0 if part[0] == 0 else edges[0]
        edges[-1] = counts[row] if part[1] == len(texts[index]) else edges[-1]
        for chunk, span in windows[index, part].items():
            first, last = (character - part[0] for character in span)
            inside = [token for token, (start, stop) in enumerate(offsets) if start < last and stop > first]
            tokens = slice(edges[inside[0]], edges[inside[-1] + 1])
            tokens_of_chunks[chunk] = output["token_embeddings"][row, tokens], output["input_ids"][row, tokens]
    return tokens_of_chunks


def _pool(model: SentenceTransformer, reader: CausalModule, chunks: Sequence[_Tokens]) -> Tensor:
    """Return the vectors (B, D) of B chunks from the rest of the model."""
    states, ids = (pad_sequence(list(tokens), batch_first=True) for tokens in zip(*chunks, strict=True))
    counts = torch.tensor([len(chunk_ids) for _, chunk_ids in chunks], device=states.device)
    vectors = TokenVectors(states, torch.arange(states.shape[1], device=states.device) < counts[:, None], ids)
    if getattr(model[0], "hybrid", False):
        vectors = vectors.mean_and_last()
    features: dict[str, Any] = {**vectors.features()}
    if reader.deterministic:
        features[ONE_BY_ONE] = True
    for module in list(model.children())[1:]:
        features = module(features)
    if "sentence_embedding" not in features:
        raise ValueError("The model has no pooling, so chunks have no vectors. Add Pooling after its first module.")
    return cast(Tensor, features["sentence_embedding"])
