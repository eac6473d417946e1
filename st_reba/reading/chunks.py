"""Vectors of chunks that know the document which they are cut from (late chunking)."""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from ..modules import CausalModule
from ..modules.token_vectors import ONE_BY_ONE, TokenVectors
from ..text.layout import Layout
from ..text.tokens import Span

# A part of a text may have a few more tokens on its own than within the text.
_SLACK = 8

# The numbers of a text, and of a chunk in it.
_Chunk = tuple[int, int]
# The number of a text, and the characters of it that are read at a time.
_Window = tuple[int, Span]


@dataclass(frozen=True)
class DocumentChunks:
    """The chunks of a text.

    Attributes:
        spans: The characters of each: the first, and one past the last.
        vectors: (chunks, D), float32.
    """

    spans: list[Span]
    vectors: np.ndarray


# A string is a sequence of strings; the first that fits counts.
@overload
def encode_chunks(  # type: ignore[overload-overlap]
    model: SentenceTransformer,
    texts: str,
    *,
    spans: Sequence[Span] | None = None,
    chunk_tokens: int | None = None,
    overlap: int = 0,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_size: int = 32,
    truncate_dim: int | None = None,
    normalize_embeddings: bool = False,
    show_progress_bar: bool = False,
    on_windows: Callable[[int, int], None] = lambda done, total: None,
) -> DocumentChunks: ...


@overload
def encode_chunks(
    model: SentenceTransformer,
    texts: Sequence[str],
    *,
    spans: Sequence[Sequence[Span]] | None = None,
    chunk_tokens: int | None = None,
    overlap: int = 0,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_size: int = 32,
    truncate_dim: int | None = None,
    normalize_embeddings: bool = False,
    show_progress_bar: bool = False,
    on_windows: Callable[[int, int], None] = lambda done, total: None,
) -> list[DocumentChunks]: ...


def encode_chunks(
    model: SentenceTransformer,
    texts: str | Sequence[str],
    *,
    spans: Sequence[Any] | None = None,
    chunk_tokens: int | None = None,
    overlap: int = 0,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_size: int = 32,
    truncate_dim: int | None = None,
    normalize_embeddings: bool = False,
    show_progress_bar: bool = False,
    on_windows: Callable[[int, int], None] = lambda done, total: None,
) -> DocumentChunks | list[DocumentChunks]:
    r"""A vector for each chunk of a text, of states that have read the text.

    .. math:: e_C = f\left( \{ v_i : i \in C \} \right)

    (Guenther et al., "Late Chunking".) The text is read whole, once; :math:`v_i` are what the model's first module
    hands on, and f is all that stands behind it: pooling, normalisation, filters. Special tokens that are handed on
    belong to the chunk at whose end of the text they stand. The one chunk of a whole text has the vector that
    ``model.encode`` gives it.

    A text of more tokens than the model reads at a time is read in windows that overlap by half. A chunk is read in
    the first window that holds it whole; where none does, in one that ends with it.

    Args:
        model: A model whose first module is one of st_reba's and hands on one vector for each token of the text.
        texts: One text, or several.
        spans: The chunks of the text, ``(first character, one past the last)``; for several texts, a list for each. A
            token that holds any character of a chunk belongs to it. Chunks may overlap.
        chunk_tokens: In place of ``spans``: chunks of so many of the text's own tokens; the last may have fewer, and
            characters of several tokens are not divided.
        overlap: How many tokens a chunk shares with the next one; less than ``chunk_tokens``. It is less where the next
            character has several tokens and would not fit beside them.
        prompt_name: One of the model's prompts, by name; None: its default prompt.
        prompt: A prompt in full: it stands before every text, and before every window.
        batch_size: Texts, or windows, that are read at a time, and chunks that are pooled at a time.
        truncate_dim: Keep a vector's first values; the model's own setting if None.
        normalize_embeddings: Scale vectors to length 1, after truncation.
        show_progress_bar: Whether to show one.
        on_windows: Called after each batch with how many windows (texts, where none is too long) have been read, and of
            how many.

    Returns:
        The chunks of each text, in the order of ``spans``, or of the text. A text without tokens has none.

    Raises:
        ValueError: If a setting or a span cannot be used, or the model has no vectors of tokens.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: give a whole number from 1.")
    if isinstance(texts, str):
        several, spans = [texts], None if spans is None else [spans]
    else:
        several = list(texts)
    reader, prompt = _reader(model), _prompt(model, prompt_name, prompt)
    own = reader.own_offsets(several)
    known = _spans(several, own, spans, chunk_tokens, overlap)
    # By the characters of a text that are read at a time, the chunks that are read off them.
    windows: dict[_Window, list[int]] = {}
    for number, text in enumerate(several):
        for chunk, part in enumerate(_parts(reader, text, number, own[number], known[number], prompt)):
            windows.setdefault((number, part), []).append(chunk)
    dimension = truncate_dim or model.truncate_dim
    found: dict[_Chunk, np.ndarray] = {}
    # Longest first, as in encode.
    order = sorted(windows, key=lambda window: window[1][0] - window[1][1])
    model.eval()
    model.to(model.device)
    with torch.inference_mode(), tqdm(total=len(windows), desc="Windows", disable=not show_progress_bar) as progress:
        for start in range(0, len(windows), batch_size):
            batch = {window: windows[window] for window in order[start : start + batch_size]}
            chunks = _read(reader, several, known, batch, prompt)
            # Those of like length together, so that little is padded.
            lengths = sorted(chunks, key=lambda chunk: len(chunks[chunk][1]))
            for first in range(0, len(lengths), batch_size):
                together = {chunk: chunks[chunk] for chunk in lengths[first : first + batch_size]}
                found.update(_pooled(model, reader, together, dimension, normalize_embeddings))
            progress.update(len(batch))
            on_windows(start + len(batch), len(windows))
    width = model.get_embedding_dimension() or 0
    nothing = np.zeros((0, min(width, dimension or width)), np.float32)
    result = []
    for number, of_text in enumerate(known):
        vectors = [found[number, chunk] for chunk in range(len(of_text))]
        result.append(DocumentChunks(of_text, np.stack(vectors) if vectors else nothing))
    return result[0] if isinstance(texts, str) else result


def check_chunk_tokens(chunk_tokens: int, overlap: int) -> None:
    """Refuse chunks of no tokens, or that do not go on.

    Raises:
        ValueError: If they are.
    """
    if type(chunk_tokens) is not int or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens!r}: give the tokens of a chunk, 1 or more.")
    if type(overlap) is not int or not 0 <= overlap < chunk_tokens:
        raise ValueError(
            f"overlap={overlap!r}: give the tokens that a chunk shares with the next one, 0 to {chunk_tokens - 1}, "
            "fewer than it has."
        )


def _spans(
    texts: Sequence[str], own: Sequence[Sequence[Span]], spans: Any, chunk_tokens: int | None, overlap: int
) -> list[list[Span]]:
    """The characters of each text's chunks: those of so many tokens, or those that were given."""
    if spans is None and chunk_tokens is not None:
        check_chunk_tokens(chunk_tokens, overlap)
        return [_cut(tokens, chunk_tokens, overlap) for tokens in own]
    if spans is None or chunk_tokens is not None:
        raise ValueError("Give the chunks either as spans, or by chunk_tokens, how many tokens each has.")
    if len(spans) != len(texts):
        raise ValueError(f"{len(texts)} texts and {len(spans)} lists of spans were given: give one list a text.")
    if overlap:
        raise ValueError(f"overlap={overlap}: spans say themselves where they overlap. Leave it out.")
    return [[_checked(span, text, number) for span in spans[number]] for number, text in enumerate(texts)]


def _reader(model: SentenceTransformer) -> CausalModule:
    """The model's first module, which hands on every token of a text."""
    module = model[0]
    if not isinstance(module, CausalModule):
        raise ValueError(
            f"The model's first module is {type(module).__name__}: chunks are read by one of st_reba's modules."
        )
    if reason := module.no_chunks:
        raise ValueError(f"{type(module).__name__} {reason}")
    # Its twin on the same weights hands on every token that pool_over names.
    reader = copy.copy(module)
    reader.rows, reader.combines = "all", False
    return reader


def _prompt(model: SentenceTransformer, name: str | None, prompt: str | None) -> str | None:
    """What stands before each text, as for ``model.encode``."""
    if prompt is not None:
        return prompt
    if name is not None and name not in model.prompts:
        names = ", ".join(f'"{name}"' for name in model.prompts) or "none"
        raise ValueError(f'prompt_name="{name}": the model has {names}. Or give the prompt in full.')
    return model.prompts.get(name or model.default_prompt_name or "")


def _cut(own: Sequence[Span], length: int, overlap: int) -> list[Span]:
    """Chunks of so many tokens, as the characters from the first one's to the last one's."""
    # Where a chunk may begin or end: at the tokens at which a character begins, and at the end.
    cuts = [index for index, (start, _) in enumerate(own) if not index or start >= own[index - 1][1]] + [len(own)]
    spans: list[Span] = []
    first = last = 0
    while cuts[last] < len(own):
        # The next character is part of the chunk, alone if it is longer than one: the overlap gives way.
        while first < last and cuts[last + 1] - cuts[first] > length:
            first += 1
        last = max(last + 1, bisect_right(cuts, cuts[first] + length) - 1)
        spans.append((own[cuts[first]][0], own[cuts[last] - 1][1]))
        first = max(first + 1, bisect_right(cuts, cuts[last] - overlap) - 1)
    return spans


def _checked(span: Any, text: str, number: int) -> Span:
    pair = tuple(span) if isinstance(span, Sequence) and not isinstance(span, str) else ()
    if [type(place) for place in pair] != [int, int] or not 0 <= pair[0] < pair[1] <= len(text):
        raise ValueError(
            f"Text {number} has the span {span!r}: give (first character, one past the last), within its {len(text)} "
            "characters, at least one."
        )
    return pair[0], pair[1]


def _parts(
    reader: CausalModule, text: str, number: int, own: Sequence[Span], spans: Sequence[Span], prompt: str | None
) -> list[Span]:
    """The characters of a text that are read for each of its chunks."""
    limit = reader.max_tokens(prompt)
    whole = [(0, len(text))] * len(spans)
    if not spans or not own or limit is None:
        return whole
    # With all that stands around it, the text may have a token more than on its own.
    if len(own) <= limit and reader.token_offsets(text, prompt)[-1][1] >= own[-1][1]:
        return whole
    length = max(1, limit - min(_SLACK, limit // 4))
    step = max(1, length // 2)
    begins, ends = [begin for begin, _ in own], [end for _, end in own]
    parts = []
    for span in spans:
        first, behind = bisect_right(ends, span[0]), bisect_left(begins, span[1])
        if behind - first > length:
            raise ValueError(
                f"Text {number} has the span {span}, {behind - first} tokens, and the model reads {length} of a longer "
                "text at a time. Divide it."
            )
        start = -(-max(0, behind - length) // step) * step
        start = min(start if start <= first else behind - length, max(0, len(own) - length))
        end = start + length
        parts.append((begins[start] if start else 0, ends[end - 1] if end < len(own) else len(text)))
    return parts


def _read(
    reader: CausalModule,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    windows: Mapping[_Window, Sequence[int]],
    prompt: str | None,
) -> dict[_Chunk, tuple[Tensor, Tensor]]:
    """The states (n, D) and ids (n,) of the tokens of each chunk of these windows."""
    parts = [texts[number][begin:end] for number, (begin, end) in windows]
    features = reader.preprocess(parts, prompt=prompt)
    layout = Layout.of(features)
    # What is handed on before the text: special tokens, as a rule.
    before = (layout.copy_index >= 0).cumsum(dim=1) == 0
    leading = (reader.selected(layout) & before).sum(dim=1).tolist()
    handed = reader(features)
    counts = handed["attention_mask"].sum(dim=1).tolist()
    found = {}
    for row, (number, (part_begin, part_end)) in enumerate(windows):
        text, offsets = texts[number], reader.token_offsets(parts[row], prompt)
        # Where each token of the text begins among those that are handed on, and where the last one ends.
        edges = list(range(leading[row], leading[row] + len(offsets) + 1))
        # What stands around the text belongs to the chunks at its ends.
        if part_begin == 0:
            edges[0] = 0
        if part_end == len(text):
            edges[-1] = counts[row]
        for chunk in windows[number, (part_begin, part_end)]:
            begin, end = spans[number][chunk]
            first, last = begin - part_begin, end - part_begin
            own = [index for index, (start, stop) in enumerate(offsets) if start < last and stop > first]
            if not own:
                raise ValueError(
                    f"Text {number} has the span {(begin, end)}, {text[begin:end]!r}, in which the tokenizer finds no "
                    "token. Leave it out, or make it longer."
                )
            tokens = slice(edges[own[0]], edges[own[-1] + 1])
            found[number, chunk] = handed["token_embeddings"][row, tokens], handed["input_ids"][row, tokens]
    return found


def _pooled(
    model: SentenceTransformer,
    reader: CausalModule,
    chunks: Mapping[_Chunk, tuple[Tensor, Tensor]],
    dimension: int | None,
    normalize_embeddings: bool,
) -> dict[_Chunk, np.ndarray]:
    """What the rest of the model makes of each chunk."""
    states, ids = (pad_sequence(list(tokens), batch_first=True) for tokens in zip(*chunks.values(), strict=True))
    counts = torch.tensor([len(own) for _, own in chunks.values()], device=states.device)
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
    embeddings = features.get("sentence_embedding")
    if embeddings is None:
        raise ValueError("The model has no pooling, so a chunk has no vector: add Pooling behind its first module.")
    embeddings = embeddings[:, :dimension]
    if normalize_embeddings:
        embeddings = normalize(embeddings, dim=1)
    return dict(zip(chunks, embeddings.float().cpu().numpy(), strict=True))
