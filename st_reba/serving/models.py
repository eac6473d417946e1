"""Saved models as a server runs them: texts to vectors, and pairs to scores, with what each costs in tokens."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize
from sentence_transformers.util import load_file_path

# A model may name our modules.
from ..encoding import Encoder
from ..lm.backbone import positions
from ..modules import CausalModule
from .refusals import RefusedError, shortened
from .tokens import OwnTokenizer

#: What others call a text that is asked for, and one that is searched.
_INPUT_TYPES = {"search_query": "query", "search_document": "document", "passage": "document"}
#: Those for which ST has methods.
QUERY, DOCUMENT = "query", "document"


class NotFiniteError(Exception):
    """A model's result is no number."""


@dataclass(frozen=True)
class Measured:
    """Texts that are about to be run.

    Attributes:
        items: They, without most of what the model would not read.
        read: Tokens of each that the model reads, without what it puts around them.
        cost: Tokens that run for each.
    """

    items: list[Any]
    read: list[int]
    cost: list[int]


class Served(ABC):
    """A model by name, and the ways in which it reads texts.

    Args:
        name: What requests call it.
        model: It.
        truncate: Whether texts that are too long are cut, or refused.

    Attributes:
        tokens: Of its texts.
        ways: What is run together, by what it is called after a colon; "" is the plain one.
    """

    def __init__(self, name: str, model: Any, truncate: bool) -> None:
        self.name = name
        self.tokens = OwnTokenizer(model.tokenizer)
        self.ways: dict[str, Callable[[list[Any]], Sequence[Any]]] = {}
        self._truncate = truncate

    @property
    def names(self) -> list[str]:
        """All that requests may call it."""
        return [self.name, *(f"{self.name}:{way}" for way in self.ways if way)]

    @abstractmethod
    def guess(self, way: str, items: Sequence[Any]) -> int:
        """About how many tokens run for items that are not tokenised yet: four characters each."""

    @abstractmethod
    def measure(self, way: str, items: Sequence[Any], first: int = 0) -> Measured:
        """How many tokens items have.

        Args:
            way: The way.
            items: A part of a request's.
            first: Where in the request they begin.

        Raises:
            RefusedError: If one is longer than the model reads, and is not to be cut; or is longer than can be read.
        """

    def _part(self, text: str, limit: int | None, param: str, index: int) -> tuple[str, int]:
        """What of a text is run, and how many tokens that has."""
        try:
            return self.tokens.cut(text, limit, count_all=not self._truncate)
        except ValueError as error:
            raise RefusedError(
                400, f"'{param}'[{index}] {error}.", param=param, code="context_length_exceeded"
            ) from None

    def _read(self, length: int, whole: bool, limit: int | None, param: str, index: int) -> int:
        """How many tokens the model reads of a text that has so many, or, if that is not the whole, more."""
        if limit is None or length <= limit:
            return length
        if not self._truncate:
            raise RefusedError(
                400,
                f"'{param}'[{index}] has {'' if whole else 'more than '}{length} tokens, and the model reads {limit}: "
                "send it in parts.",
                param=param,
                code="context_length_exceeded",
            )
        return limit


class Embedder(Served):
    """A SentenceTransformer, which gives what its ``encode``, ``encode_query`` and ``encode_document`` give.

    Raises:
        ValueError: If the model does not give one vector a text.
    """

    def __init__(self, name: str, model: SentenceTransformer, truncate: bool = True) -> None:
        super().__init__(name, model, truncate)
        self.model = model
        self._normalizes = any(isinstance(module, Normalize) for module in model.children())
        prompts: dict[str, str | None] = {"": None, QUERY: None, DOCUMENT: None, **model.prompts}
        calls: dict[str, Callable[..., Any]] = {
            "": model.encode, QUERY: model.encode_query, DOCUMENT: model.encode_document
        }  # fmt: skip
        for way in prompts:
            call = calls.get(way) or partial(model.encode, prompt_name=way)
            self.ways[way] = partial(self._run, call)
        default = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None
        prompts = {way: model.prompts.get(way, default) if way else default for way in prompts}
        self._limits = {way: self._limit(prompt) for way, prompt in prompts.items()}
        self._around = {way: _cells(model.preprocess(["a"], prompt=prompt)) for way, prompt in prompts.items()}
        self._copies = _copies(model[0])
        # Every kernel is loaded before the first request, and what is no embedder shows.
        found = self.ways[""](["a"])
        self.dimensions = len(found[0])

    def way(self, suffix: str, input_type: str | None) -> str:
        """The one that a request asks for.

        Args:
            suffix: Of the model's name.
            input_type: Of the request.

        Raises:
            RefusedError: If there is none of that name, or two are asked for.
        """
        if input_type is None:
            return suffix
        way = _INPUT_TYPES.get(input_type, input_type)
        if way not in self.ways or not way:
            names = ", ".join(f'"{way}"' for way in self.ways if way)
            raise RefusedError(
                400, f"'input_type' is \"{shortened(input_type)}\": this model has {names}.", param="input_type"
            )
        if suffix and way != suffix:
            raise RefusedError(
                400,
                f'The model\'s name asks for "{suffix}" and \'input_type\' for "{way}": give one of them.',
                param="input_type",
            )
        return way

    def guess(self, way: str, items: Sequence[str | list[int]]) -> int:
        limit = self._limits[way]
        lengths = (len(item) // 4 if isinstance(item, str) else len(item) for item in items)
        read = sum(lengths if limit is None else (min(length, limit) for length in lengths))
        return self._around[way] * len(items) + self._copies * read

    def measure(self, way: str, items: Sequence[str | list[int]], first: int = 0) -> Measured:
        limit = self._limits[way]
        texts, read = [], []
        for index, item in enumerate(items, first):
            text = item if isinstance(item, str) else self._text(item, limit, index)
            part, length = self._part(text, limit, "input", index)
            if isinstance(item, str):
                length = self._read(length, len(part) == len(text), limit, "input", index)
            else:
                length = self._read(len(item), True, limit, "input", index)
            texts.append(part)
            read.append(length)
        return Measured(texts, read, [self._around[way] + self._copies * length for length in read])

    def _text(self, ids: list[int], limit: int | None, index: int) -> str:
        try:
            return self.tokens.text(ids, limit)
        except ValueError as error:
            raise RefusedError(
                400,
                f"'input'[{index}]: {error}. Send the text, or tokens of the model's own tokenizer (some clients send "
                "those of OpenAI's models: tell them not to).",
                param="input",
            ) from None

    def check_dimensions(self, dimensions: int) -> None:
        """Refuse more values than a vector has.

        Raises:
            RefusedError: So.
        """
        if not 1 <= dimensions <= self.dimensions:
            raise RefusedError(
                400,
                f"'dimensions' is {shortened(dimensions)}: give a number from 1 to {self.dimensions}.",
                param="dimensions",
            )

    def first(self, vector: np.ndarray, dimensions: int | None) -> np.ndarray:
        """A vector's first values, of length 1 again if the model normalizes: ``encode(truncate_dim=...)`` of it."""
        if dimensions is None:
            return vector
        first = torch.from_numpy(vector[:dimensions])
        return (torch.nn.functional.normalize(first, dim=0) if self._normalizes else first).numpy()

    def similarities(self, query: np.ndarray, documents: Sequence[np.ndarray]) -> list[float]:
        """Of one vector to others, as the model compares them."""
        found: list[float] = self.model.similarity(query[None], np.stack(documents))[0].tolist()
        return found

    def _limit(self, prompt: str | None) -> int | None:
        """Tokens of a text that are read behind a prompt; None: no limit."""
        first = self.model[0]
        if isinstance(first, CausalModule):
            return first.max_tokens(prompt)
        limit = self.model.max_seq_length
        around = _cells(self.model.preprocess([""], prompt=prompt))
        return None if limit is None or limit > 10**9 else max(0, limit - around)

    def _run(self, call: Callable[..., Any], texts: list[str]) -> list[np.ndarray]:
        vectors = np.asarray(call(texts, batch_size=len(texts), show_progress_bar=False))
        if vectors.ndim != 2:
            raise ValueError(f"The model {self.name} does not give one vector a text: serve one that does.")
        vectors = vectors.astype(np.float32, copy=False)
        if not np.isfinite(vectors).all():
            raise NotFiniteError("The model's vector of this text has values that are no numbers.")
        return list(vectors)


class Reranker(Served):
    """A CrossEncoder, which gives what its ``predict`` gives.

    Raises:
        ValueError: If it gives something else than one score a pair.
    """

    def __init__(self, name: str, model: CrossEncoder, truncate: bool = True) -> None:
        super().__init__(name, model, truncate)
        if model.num_labels != 1:
            raise ValueError(f"The model {name} gives {model.num_labels} scores a pair: to order texts needs one.")
        self.model = model
        self.ways[""] = self._run
        self._around = _cells(model.preprocess([("a", "a")]))
        limit = model.max_seq_length
        self._document_limit = None if limit is None or limit > 10**9 else int(limit)
        self._limit = None if self._document_limit is None else max(0, self._document_limit - max(0, self._around - 2))
        first = next(iter(model.children()), None)
        # A recipe's limit is that of documents; a query that does not fit is no text to be cut.
        self._query_limit = positions(first.model) if isinstance(first, CausalModule) else self._document_limit
        self._run([("a", "a")])

    def guess(self, way: str, items: Sequence[tuple[str, str]]) -> int:
        lengths = ((len(query) + len(document)) // 4 for query, document in items)
        return sum(self._around + (length if self._limit is None else min(length, self._limit)) for length in lengths)

    def measure(self, way: str, items: Sequence[tuple[str, str]], first: int = 0) -> Measured:
        whole_query = items[0][0]
        try:
            query, asked = self.tokens.cut(whole_query, self._query_limit)
        except ValueError as error:
            raise RefusedError(400, f"'query' {error}.", param="query", code="context_length_exceeded") from None
        pairs, read = [], []
        for index, (_, document) in enumerate(items, first):
            part, length = self._part(document, self._document_limit, "documents", index)
            whole = len(query) + len(part) == len(whole_query) + len(document)
            pairs.append((query, part))
            read.append(self._read(asked + length, whole, self._limit, "documents", index))
        return Measured(pairs, read, [self._around + length for length in read])

    def _run(self, pairs: list[tuple[str, str]]) -> Sequence[float]:
        scores = np.asarray(self.model.predict(pairs, batch_size=len(pairs), show_progress_bar=False), dtype=np.float32)
        if not np.isfinite(scores).all():
            raise NotFiniteError("The model's score of this document is no number.")
        return scores.tolist()


def load_embedder(name: str, given: Encoder, device: str, truncate: bool) -> Embedder:
    """A saved SentenceTransformer.

    Raises:
        ValueError: If it is none.
    """
    check_kind(given.model, given.revision, "SentenceTransformer")
    return Embedder(name, given.pinned().load(device), truncate)


def load_reranker(name: str, path: str, revision: str | None, device: str, dtype: str, truncate: bool) -> Reranker:
    """A saved CrossEncoder.

    Raises:
        ValueError: If it is none.
    """
    check_kind(path, revision, "CrossEncoder")
    return Reranker(name, CrossEncoder(path, revision=revision, device=device, model_kwargs={"dtype": dtype}), truncate)


#: What is served, and how it is asked for.
_HINTS = {
    "CrossEncoder": "it orders texts: give it as --rerank",
    "SentenceTransformer": "it gives vectors: give it as MODEL, without --rerank",
}


def check_kind(path: str, revision: str | None, wanted: str) -> None:
    """Refuse what is saved as another class of sentence-transformers'; what is not saved as one is not known here."""
    settings = load_file_path(path, "config_sentence_transformers.json", revision=revision)
    if settings is not None:
        kind = json.loads(Path(settings).read_text(encoding="utf-8")).get("model_type", "SentenceTransformer")
    elif load_file_path(path, "modules.json", revision=revision) is not None:
        kind = "SentenceTransformer"
    else:
        # A bare language model, which is no embedder, or a CrossEncoder saved as transformers' classifier alone.
        return
    if kind != wanted:
        hint = _HINTS.get(kind, "serve gives one vector a text, or orders texts by a CrossEncoder")
        raise ValueError(f"The model {path} is a saved {kind}; {hint}.")


def _cells(features: dict[str, Any]) -> int:
    """Tokens that run."""
    ids = features.get("input_ids")
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0


def _copies(module: Any) -> int:
    """How many tokens run for each of a text."""
    return int(getattr(module, "copies", 1)) * int(getattr(module, "rows_per_text", 1))
