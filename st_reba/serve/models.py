"""Saved models as the server runs them: texts to vectors, and queries with documents to scores."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize
from tokenizers import Tokenizer

from ..hub.push import BY_ATTENTION, loading_class, saved_class
from ..lm.backbone import positions
from ..modules import AttentionReranker, AttentionRerankModule, CausalModule, EndpointTransformer
from .forms import RefusedError

#: Ways for which sentence-transformers has methods.
QUERY, DOCUMENT = "query", "document"

# Characters that are tokenised at first for each token that the model reads.
_CHARACTERS = 8
# Tokens after those that the model reads. A cut changes the tokens before it, at most those of one word: WordPiece
# takes one of more than 100 characters for unknown.
_BEHIND = 256
#: Characters of a text that are tokenised, at most, to find the tokens that the model reads.
CHARACTERS = 2**20
#: Values in the keys and values of one request's documents, if they are read together: 2 GiB in float32.
KEPT_VALUES = 2**29


class Sized(NamedTuple):
    """Item with its size.

    Attributes:
        item: Text, or query with documents, cut to about what the model reads.
        read: Number of tokens that the model reads, without those that it adds.
        cost: Number of tokens that run.
    """

    item: Any
    read: int
    cost: int


class Way(NamedTuple):
    """Way in which a model reads texts.

    Attributes:
        run: Items to results; items with the same ``run`` may share a batch.
        limit: Number of tokens of an item that are read; None: no limit.
        around: Number of tokens that the model adds to an item.
        copies: Number of tokens that run for each token of an item.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    limit: int | None
    around: int
    copies: int = 1


class Served:
    """Model with a name, and the ways in which it reads texts.

    Args:
        name: Name in requests.
        tokenizer: Tokenizer of the model.
        truncate: Whether texts that are too long are cut, or refused.
        ways: Ways by the part of a name after a colon; "" is the plain one.
    """

    def __init__(self, name: str, tokenizer: Any, truncate: bool, ways: dict[str, Way]) -> None:
        self.name, self.ways = name, ways
        self.tokens = OwnTokenizer(tokenizer)
        self._truncate = truncate

    @property
    def names(self) -> list[str]:
        """All names in requests."""
        return [self.name, *(f"{self.name}:{way}" for way in self.ways if way)]

    def guess(self, way: str, items: Sequence[Any]) -> int:
        """Estimate how many tokens run for items: one for four characters."""
        _, limit, around, copies = self.ways[way]
        lengths = [len("".join(item)) // 4 for item in items]
        return around * len(items) + copies * sum(lengths if limit is None else [min(each, limit) for each in lengths])

    def _read(self, length: int, limit: int | None, where: str) -> int:
        """Return how many of a text's tokens the model reads.

        Raises:
            RefusedError: If not all, and texts are not to be cut.
        """
        if limit is not None and length > limit and not self._truncate:
            raise _too_long(where, f"has {length} tokens, and the model reads {limit}: send it in parts.")
        return length if limit is None else min(length, limit)


class Embedder(Served):
    """A SentenceTransformer; its vectors are those of ``encode``, ``encode_query`` and ``encode_document``.

    Raises:
        ValueError: If the model does not give one vector a text, or asks another server.
    """

    def __init__(self, name: str, model: SentenceTransformer, truncate: bool = True) -> None:
        if isinstance(model[0], EndpointTransformer):
            raise ValueError(
                f"{name}: its texts are sent to {model[0].url}, and a server in front of a server is not served here. "
                "Use st-reba encode, or SentenceTransformer in your own program."
            )
        self.model = model
        self._normalizes = any(isinstance(module, Normalize) for module in model.children())
        calls: dict[str, Callable[..., Any]] = {
            "": model.encode, QUERY: model.encode_query, DOCUMENT: model.encode_document
        }  # fmt: skip
        for prompt_name in model.prompts:
            calls.setdefault(prompt_name, partial(model.encode, prompt_name=prompt_name))
        super().__init__(name, model.tokenizer, truncate, {way: self._way(way, call) for way, call in calls.items()})
        # It also loads every kernel before the first request.
        self.dimensions = len(self.ways[""].run(["a"])[0])

    def _way(self, way: str, call: Callable[..., Any]) -> Way:
        model, first, limit = self.model, self.model[0], self.model.max_seq_length
        default = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None
        prompt = model.prompts.get(way, default)
        # The first module may have a length of its own for queries and for documents.
        own_length = getattr(first, f"{way}_length", None) if way in (QUERY, DOCUMENT) else None
        if isinstance(first, CausalModule):
            limit = first.max_tokens(prompt, None if own_length is None else {"text": {"max_length": own_length}})
        elif limit is not None:
            ends = _cells(model.preprocess([""], prompt=prompt))
            limit = None if limit > 10**9 else max(0, min(limit, own_length or limit) - ends)
        copies = int(getattr(first, "copies", 1)) * int(getattr(first, "rows_per_text", 1))
        return Way(partial(self._run, call), limit, _cells(model.preprocess(["a"], prompt=prompt)), copies)

    def measure(self, way: str, items: Sequence[str], first: int = 0) -> list[Sized]:
        """Count the tokens of items.

        Args:
            way: The way.
            items: Part of a request's texts.
            first: Index of the first item in the request.

        Raises:
            RefusedError: If an item is too long.
        """
        _, limit, around, copies = self.ways[way]
        sized = []
        for index, text in enumerate(items, first):
            where = f"'input'[{index}]"
            part, length = self.tokens.cut(text, limit, where, whole=not self._truncate)
            read = self._read(length, limit, where)
            sized.append(Sized(part, read, around + copies * read))
        return sized

    def first(self, vector: np.ndarray, dimensions: int | None) -> np.ndarray:
        """Return a vector's first values, scaled to length 1 again if the model normalizes."""
        if dimensions is None:
            return vector
        first = torch.from_numpy(vector[:dimensions])
        return (torch.nn.functional.normalize(first, dim=0) if self._normalizes else first).numpy()

    def _run(self, call: Callable[..., Any], texts: list[str]) -> Sequence[np.ndarray]:
        vectors = np.asarray(call(texts, batch_size=len(texts), show_progress_bar=False))
        if vectors.ndim != 2:
            raise ValueError(f"The model {self.name} does not give one vector a text: serve one that does.")
        return list(_finite(vectors.astype(np.float32, copy=False), "vector of this text"))


class Reranker(Served):
    """A CrossEncoder; its scores are those of ``predict``.

    Raises:
        ValueError: If it does not give one score a pair.
    """

    def __init__(self, name: str, model: CrossEncoder, truncate: bool = True) -> None:
        if model.num_labels != 1:
            raise ValueError(f"The model {name} gives {model.num_labels} scores a pair: to order texts needs one.")
        self.model = model
        around, limit = _cells(model.preprocess([("a", "a")])), model.max_seq_length
        self._document_limit = None if limit is None or limit > 10**9 else int(limit)
        both = None if self._document_limit is None else max(0, self._document_limit - max(0, around - 2))
        super().__init__(name, model.tokenizer, truncate, {"": Way(self._run, both, around)})
        self._run([("a", "a")])

    def items(self, query: str, documents: Sequence[Any]) -> list[tuple[str, ...]]:
        """Return the items of a request, which may run in different batches: pairs."""
        return [(query, document) for document in documents]

    def scores(self, results: list[Any]) -> list[float]:
        """Return the scores of the documents, given the results of the items."""
        return results

    def measure(self, way: str, items: Sequence[tuple[str, ...]], first: int = 0) -> list[Sized]:
        """Count the tokens of items, as :meth:`Embedder.measure`."""
        _, limit, around, _ = self.ways[way]
        query, asked = self.tokens.cut(items[0][0], self._document_limit, "'query'", whole=not self._truncate)
        sized = []
        for index, (_, document) in enumerate(items, first):
            where = f"'documents'[{index}]"
            part, length = self.tokens.cut(document, self._document_limit, where, whole=not self._truncate)
            read = self._read(asked + length, limit, where)
            sized.append(Sized((query, part), read, around + read))
        return sized

    def _run(self, pairs: Any) -> Sequence[Any]:
        found = self.model.predict(pairs, batch_size=len(pairs), show_progress_bar=False)
        scores: list[float] = _finite(np.asarray(found, dtype=np.float32), "score of this document").tolist()
        return scores


class ListReranker(Reranker):
    """An :class:`AttentionReranker`, which reads all documents of a request together: they are one item.

    It refuses a query that leaves no room for a document, and more tokens than :data:`KEPT_VALUES` allows.
    """

    def __init__(self, name: str, model: AttentionReranker, truncate: bool = True) -> None:
        module = model[0]
        assert isinstance(module, AttentionRerankModule)
        self.model, self._rotations, self._query_limit = model, module.rotations, positions(module.model)
        limits = [limit for limit in (self._query_limit, module.max_seq_length) if limit is not None]
        self._document_limit = min(limits, default=None)
        config = module.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._most = KEPT_VALUES // (2 * config.num_hidden_layers * heads * size)
        Served.__init__(self, name, model.tokenizer, truncate, {"": Way(self._run, None, 0, self._rotations)})
        self._run([("a", "a", "b")])

    def items(self, query: str, documents: Sequence[Any]) -> list[tuple[str, ...]]:
        """Return one item with all documents."""
        return [(query, *documents)]

    def scores(self, results: list[Any]) -> list[float]:
        """Return the scores of the one item."""
        return list(results[0])

    def measure(self, way: str, items: Sequence[tuple[str, ...]], first: int = 0) -> list[Sized]:
        """Count the tokens of items, as :meth:`Embedder.measure`."""
        [(query, *documents)] = items
        # The model refuses a query that is too long.
        query, asked = self.tokens.cut(query, self._query_limit, "'query'")
        parts, read = [], 0
        for index, document in enumerate(documents):
            where = f"'documents'[{index}]"
            part, length = self.tokens.cut(document, self._document_limit, where, whole=not self._truncate)
            parts.append(part)
            read += self._read(length, self._document_limit, where)
        if read > self._most:
            said = f"'documents' have {read:,} tokens, and are read together, {self._most:,} at most: send fewer."
            raise RefusedError(400, said, param="documents")
        return [Sized((query, *parts), asked + read, self._rotations * (2 * asked + read))]

    def _run(self, lists: Any) -> Sequence[Any]:
        try:
            return [super(ListReranker, self)._run([(query, text) for text in texts]) for query, *texts in lists]
        except ValueError as error:
            # The query leaves no room for a document.
            raise RefusedError(400, str(error), param="query", code="context_length_exceeded") from error


class OwnTokenizer:
    """Copy of a tokenizer: two threads cannot use one while one of them sets how it truncates.

    Args:
        tokenizer: One of transformers, or of ``tokenizers``, as ST's ``StaticEmbedding`` has.
    """

    def __init__(self, tokenizer: Any) -> None:
        inner: Any = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
        self._fast = isinstance(inner, Tokenizer)
        self._from_end = getattr(tokenizer, "truncation_side", "right") == "left"
        self._tokenizer: Any = copy.deepcopy(inner if self._fast else tokenizer)
        if self._fast:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a whole text, without special tokens."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return found.ids if self._fast else found

    def cut(self, text: str, limit: int | None, where: str, whole: bool = False) -> tuple[str, int]:
        """Return the part of a text that decides which tokens the model reads, and its number of tokens.

        A tokenizer reads a text as a whole before it cuts it, and needs a second for a million characters. So only a
        part is tokenised, and a larger one if that has too few tokens: tokenizers may drop any number of characters,
        such as blanks. The first ``limit`` tokens of the part are those of the text, except for a text whose tokens
        depend on characters more than 256 tokens after them.

        Args:
            text: The text.
            limit: Number of tokens that the model reads; None: all.
            where: Name of the text in its request.
            whole: Whether all tokens of the text are counted.

        Raises:
            RefusedError: If a text is longer than :data:`CHARACTERS`, and so many do not have the tokens that are read
                or counted.
        """
        wanted = None if limit is None or whole else limit + _BEHIND
        most = CHARACTERS if limit is None else max(CHARACTERS, _CHARACTERS * (limit + _BEHIND))
        for size in (most,) if wanted is None else (_CHARACTERS * wanted, most):
            part = text[-size:] if self._from_end else text[:size]
            count = len(self.ids(part))
            if len(part) == len(text) or (wanted is not None and count >= wanted):
                return part, count
        raise _too_long(
            where,
            f"has {len(text):,} characters, and the first {most:,}, which is as far as the server looks, do not have "
            "all tokens that the model reads: send it in parts.",
        )


def load_reranker(name: str, path: str, revision: str | None, device: str, dtype: str, truncate: bool) -> Reranker:
    """Load a CrossEncoder, or an AttentionReranker, which is saved as one.

    Raises:
        ValueError: If the model is neither.
    """
    check_kind(path, revision, "CrossEncoder")
    settings: dict[str, Any] = {"revision": revision, "device": device, "model_kwargs": {"dtype": dtype}}
    if loading_class(path, revision) == BY_ATTENTION:
        return ListReranker(name, AttentionReranker(path, **settings), truncate)
    return Reranker(name, CrossEncoder(path, **settings), truncate)


#: Saved classes that are served, and how they are given.
_HINTS = {
    "CrossEncoder": "it orders texts: give it as --rerank",
    "SentenceTransformer": "it gives vectors: give it as MODEL, without --rerank",
}


def check_kind(path: str, revision: str | None, wanted: str) -> None:
    """Refuse a model that is saved as another class of sentence-transformers than the one wanted.

    Raises:
        ValueError: If it is.
    """
    # None: a language model, or a CrossEncoder that transformers saved.
    kind = saved_class(path, revision)
    if kind not in (None, wanted):
        hint = _HINTS.get(str(kind), f"serve takes a {' or a '.join(_HINTS)}: use it in your own program")
        raise ValueError(f"The model {path} is a saved {kind}; {hint}.")


def _too_long(where: str, said: str) -> RefusedError:
    return RefusedError(400, f"{where} {said}", param=where.split("'")[1], code="context_length_exceeded")


def _finite(found: np.ndarray, what: str) -> np.ndarray:
    if not np.isfinite(found).all():
        raise RefusedError(500, f"The model's {what} has values that are no numbers.")
    return found


def _cells(features: dict[str, Any]) -> int:
    """Return how many tokens run."""
    ids = features.get("input_ids")
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0
