"""Vectors of chunks that know the document which they are cut from (late chunking)."""

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

from ..modules import CausalModule
from ..modules.token_vectors import ONE_BY_ONE, TokenVectors
from ..text.layout import Layout
from ..text.tokens import Span
from .words import own_offsets, token_offsets

# A part of a text may have a few more tokens on its own than within the text.
_SLACK = 8

# By the number of a text and the characters of it that are read at a time, the numbers and characters of its chunks.
_Windows = dict[tuple[int, Span], dict[int, Span]]
# States (n, D) and ids (n,) of tokens.
_Tokens = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DocumentChunks:
    """The chunks of a text.

    Attributes:
        spans: The characters of each: the first, and one past the last.
        vectors: (chunks, D), float32.
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
    r"""Return a vector for each chunk of each text, made from states that have read the text.

    .. math:: e_C = f\left( \{ v_i : i \in C \} \right)

    (Guenther et al., "Late Chunking".) The text is read whole, once; :math:`v_i` are the token vectors of the model's
    first module, and f is the rest of the model: pooling, normalisation, filters. Special tokens belong to the chunk at
    whose end of the text they are. If a text has one chunk alone, its vector is that of ``model.encode``.

    A text of more tokens than the model reads at a time is read in windows that overlap by half. A chunk is read in
    the first window that holds it whole; where none does, in one that ends with it.

    Args:
        model: A model whose first module is one of st_reba's and gives one vector for each token of the text.
        texts: The documents.
        chunk_tokens: Number of the text's own tokens in a chunk; the last may have fewer, and characters of several
            tokens are not divided.
        overlap: How many tokens a chunk shares with the next one; less than ``chunk_tokens``. It is less where the next
            character has several tokens and would not fit.
        prompt_name: One of the model's prompts, by name; None: its default prompt.
        prompt: A prompt in full, in front of every text and of every window.
        batch_size: Texts, or windows, that are read at a time, and chunks that are pooled at a time.
        truncate_dim: Keep a vector's first values; the model's own setting if None.
        normalize_embeddings: Scale vectors to length 1, after truncation.

    Returns:
        The chunks of each text, in order. A text without tokens has none.

    Raises:
        ValueError: If a setting cannot be used, or the model has no vectors of tokens.
    """
    check_chunk_tokens(chunk_tokens, overlap)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: give a whole number from 1.")
    if isinstance(texts, str):
        raise ValueError("texts is one string: give a list of texts.")
    if prompt is None and prompt_name not in (None, *model.prompts):
        names = ", ".join(map(repr, model.prompts)) or "none"
        raise ValueError(f"prompt_name={prompt_name!r}: the model has {names}. Or give the prompt in full.")
    prompt = model.prompts.get(prompt_name or model.default_prompt_name or "") if prompt is None else prompt
    reader = _reader(model)
    spans: list[list[Span]] = []
    windows: _Windows = {}
    numbers = count()
    for number, (text, own) in enumerate(zip(texts, own_offsets(reader, texts), strict=True)):
        chunks = _cut(own, chunk_tokens, overlap)
        spans.append([(own[first][0], own[last - 1][1]) for first, last in chunks])
        for part, span in zip(_parts(reader, text, own, chunks, prompt), spans[-1], strict=True):
            windows.setdefault((number, part), {})[next(numbers)] = span
    width, dimension = model.get_embedding_dimension() or 0, truncate_dim or model.truncate_dim
    order: list[int] = []
    found = [np.zeros((0, min(width, dimension or width)), np.float32)]
    # Longest first, as in encode.
    longest = sorted(windows.items(), key=lambda window: window[0][1][0] - window[0][1][1])
    model.eval().to(model.device)
    with torch.inference_mode():
        for start in range(0, len(longest), batch_size):
            read = _read(reader, texts, dict(longest[start : start + batch_size]), prompt)
            for first in range(0, len(read), batch_size):
                vectors = _pooled(model, reader, list(read.values())[first : first + batch_size])[:, :dimension]
                found.append((normalize(vectors, dim=1) if normalize_embeddings else vectors).float().cpu().numpy())
            order += read
    by_text = np.split(np.concatenate(found[1:] or found)[np.argsort(order)], np.cumsum(list(map(len, spans))))[:-1]
    return [DocumentChunks(*each) for each in zip(spans, by_text, strict=True)]


def check_chunk_tokens(chunk_tokens: int, overlap: int) -> None:
    """Refuse chunks of no tokens, or that do not go on.

    Raises:
        ValueError: If they are.
    """
    if type(chunk_tokens) is not int or type(overlap) is not int or not 0 <= overlap < chunk_tokens:
        raise ValueError(
            f"chunk_tokens={chunk_tokens!r}, overlap={overlap!r}: give the tokens of a chunk, 1 or more, and how many "
            "of them it shares with the next one, fewer than it has."
        )


def _reader(model: SentenceTransformer) -> CausalModule:
    """Return the model's first module, made to give every token of a text."""
    module = model[0]
    if not isinstance(module, CausalModule):
        raise ValueError(f"The model's first module is {type(module).__name__}: chunks need one of st_reba's modules.")
    if reason := module.no_chunks:
        raise ValueError(f"{type(module).__name__} {reason}")
    reader = copy.copy(module)
    reader.rows, reader.combines = "all", False
    return reader


def _cut(own: Sequence[Span], length: int, overlap: int) -> list[Span]:
    """Return chunks of so many tokens, each by its first token and one past its last."""
    # Where a chunk may begin or end: at the tokens at which a character begins, and at the end.
    cuts = [index for index, (start, _) in enumerate(own) if not index or start >= own[index - 1][1]] + [len(own)]
    chunks: list[Span] = []
    first = last = 0
    while cuts[last] < len(own):
        # The next character is part of the chunk, alone if it is longer than one: the overlap gives way.
        while first < last and cuts[last + 1] - cuts[first] > length:
            first += 1
        last = max(last + 1, bisect_right(cuts, cuts[first] + length) - 1)
        chunks.append((cuts[first], cuts[last]))
        first = max(first + 1, bisect_right(cuts, cuts[last] - overlap) - 1)
    return chunks


def _parts(reader: CausalModule, text: str, own: list[Span], chunks: list[Span], prompt: str | None) -> list[Span]:
    """Return the characters of a text that are read for each of its chunks."""
    limit = reader.max_tokens(prompt)
    # Within its template, the text may have a token more than on its own.
    if not chunks or limit is None or (len(own) <= limit and token_offsets(reader, text, prompt)[-1][1] >= own[-1][1]):
        return [(0, len(text))] * len(chunks)
    length = max(1, limit - min(_SLACK, limit // 4))
    step = max(1, length // 2)
    parts = []
    for first, behind in chunks:
        if behind - first > length:
            raise ValueError(f"The model reads {length} tokens of a long text at a time: give chunk_tokens={length}.")
        start = -(-max(0, behind - length) // step) * step
        start = min(start if start <= first else behind - length, max(0, len(own) - length))
        end = start + length
        parts.append((own[start][0] if start else 0, own[end - 1][1] if end < len(own) else len(text)))
    return parts


def _read(reader: CausalModule, texts: Sequence[str], windows: _Windows, prompt: str | None) -> dict[int, _Tokens]:
    """Return the states and ids of the tokens of each chunk of these windows."""
    parts = [texts[number][begin:end] for number, (begin, end) in windows]
    features = reader.preprocess(parts, prompt=prompt)
    layout = Layout.of(features)
    # Tokens in front of the text: special ones, as a rule.
    before = (layout.copy_index >= 0).cumsum(dim=1) == 0
    leading = (reader.selected(layout) & before).sum(dim=1).tolist()
    output = reader(features)
    counts = output["attention_mask"].sum(dim=1).tolist()
    found = {}
    for row, (number, part) in enumerate(windows):
        offsets = token_offsets(reader, parts[row], prompt)
        # Where each token of the text begins in the output, and where the last one ends.
        edges = list(range(leading[row], leading[row] + len(offsets) + 1))
        # Tokens around the text belong to the chunks at its ends.
        edges[0] = 0 if part[0] == 0 else edges[0]
        edges[-1] = counts[row] if part[1] == len(texts[number]) else edges[-1]
        for chunk, span in windows[number, part].items():
            first, last = (place - part[0] for place in span)
            own = [index for index, (start, stop) in enumerate(offsets) if start < last and stop > first]
            tokens = slice(edges[own[0]], edges[own[-1] + 1])
            found[chunk] = output["token_embeddings"][row, tokens], output["input_ids"][row, tokens]
    return found


def _pooled(model: SentenceTransformer, reader: CausalModule, chunks: Sequence[_Tokens]) -> Tensor:
    """Return the vectors (B, D) that the rest of the model makes of B chunks."""
    states, ids = (pad_sequence(list(tokens), batch_first=True) for tokens in zip(*chunks, strict=True))
    counts = torch.tensor([len(own) for _, own in chunks], device=states.device)
    mask = torch.arange(states.shape[1], device=states.device) < counts[:, None]
    reading = reader.combined(TokenVectors(states, mask, ids))
    features: dict[str, Any] = {
        "token_embeddings": reading.states,
        "attention_mask": reading.mask.long(),
        "input_ids": reading.ids,
        **({ONE_BY_ONE: True} if reader.deterministic else {}),
    }
    for module in list(model.children())[1:]:
        features = module(features)
    if "sentence_embedding" not in features:
        raise ValueError("The model has no pooling, so a chunk has no vector: add Pooling behind its first module.")
    return cast(Tensor, features["sentence_embedding"])
