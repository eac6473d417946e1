"""Saved models in the server: embedders and rerankers."""

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
from torch import nn

from ..hub.push import BY_ATTENTION, loading_class, saved_class
from ..modules import AttentionReranker, AttentionRerankModule, CausalModule, EndpointTransformer
from ..settings import NO_LIMIT
from .requests import RefusedError

#: Modes with a method in sentence-transformers.
QUERY, DOCUMENT = "query", "document"

# Number of characters per token that are tokenized at first.
_CHARACTERS_PER_TOKEN = 8
# Number of further tokens. A cut changes tokens of at most one word before it, but WordPiece maps a word of more than
# 100 characters to one unknown token.
_MARGIN = 256
# Tokenizers without a limit have numbers beyond this one.
_UNLIMITED = 10**9
#: Maximum number of characters of a text that are tokenized.
MAX_CHARACTERS = 2**20
#: Maximum number of values in the cached keys and values of documents that are read together: 2 GiB in float32.
MAX_CACHED_VALUES = 2**29


class SizedItem(NamedTuple):
    """Item with its number of tokens.

    Attributes:
        item: Text, or query with documents, cut to about the model's limit.
        tokens: Number of tokens that the model reads, without those that it adds.
        cost: Number of tokens in the batch.
    """

    item: Any
    tokens: int
    cost: int


class Mode(NamedTuple):
    """Mode in which a model reads texts: with a prompt, as queries or as documents.

    Attributes:
        run: Function from items to results; items with the same ``run`` may share a batch.
        limit: Maximum number of tokens of an item.
        added: Number of tokens that the model adds to an item.
        copies: Number of copies of each token of an item in the batch.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    limit: int
    added: int
    copies: int = 1


class Served:
    """Model with a name and its modes.

    Args:
        name: Name in requests.
        tokenizer: Tokenizer of the model.
        truncate: Whether to truncate texts that are too long, instead of refusing them.
        modes: Modes by the part of a name after a colon; "" is the default.
    """

    def __init__(self, name: str, tokenizer: Any, truncate: bool, modes: dict[str, Mode]) -> None:
        self.name, self.modes = name, modes
        self.tokenizer = TokenizerCopy(tokenizer, count_all=not truncate)
        self._truncate = truncate

    @property
    def names(self) -> dict[str, str]:
        """Modes by their names in requests."""
        return {f"{self.name}:{mode}" if mode else self.name: mode for mode in self.modes}

    def estimate(self, mode: str, items: Sequence[Any]) -> int:
        """Estimate the number of tokens of items in batches, from one token per four characters."""
        _, limit, added, copies = self.modes[mode]
        lengths = [len("".join(item)) // 4 for item in items]
        return added * len(items) + copies * sum(min(length, limit) for length in lengths)

    def measure(self, mode: str, items: Sequence[Any], first: int = 0) -> list[SizedItem]:
        """Count the tokens of items.

        Args:
            mode: Name of the mode.
            items: Part of a request's items.
            first: Index of the first item in the request.

        Raises:
            RefusedError: If an item is too long.
        """
        raise NotImplementedError

    def _tokens_read(self, length: int, limit: int, where: str) -> int:
        """Return the number of a text's tokens that the model reads.

        Raises:
            RefusedError: If the text is too long, and texts are not truncated.
        """
        if length > limit and not self._truncate:
            raise _too_long(where, f"has {length} tokens, and the model reads {limit}: send it in parts.")
        return min(length, limit)


class Embedder(Served):
    """SentenceTransformer with the vectors of ``encode``, ``encode_query`` and ``encode_document``.

    Raises:
        ValueError: If the model does not return one vector per text, or sends texts to another server.
    """

    def __init__(self, name: str, model: SentenceTransformer, truncate: bool = True) -> None:
        if not isinstance(model, SentenceTransformer):
            raise ValueError(f"The model {name} does not return one vector per text. Serve one that does.")
        if isinstance(model[0], EndpointTransformer):
            raise ValueError(
                f"The model {name} sends texts to {model[0].url}, and cannot be served. Use st-reba encode, or "
                "SentenceTransformer in your own program."
            )
        self.model = model
        self._normalizes = any(isinstance(module, Normalize) for module in model.children())
        calls: dict[str, Callable[..., Any]] = {
            "": model.encode, QUERY: model.encode_query, DOCUMENT: model.encode_document
        }  # fmt: skip
        for prompt_name in model.prompts:
            calls.setdefault(prompt_name, partial(model.encode, prompt_name=prompt_name))
        modes = {mode: self._mode(mode, call) for mode, call in calls.items()}
        super().__init__(name, model.tokenizer, truncate, modes)
        # This also loads all kernels before the first request.
        self.dimensions = len(self.modes[""].run(["a"])[0])

    def _mode(self, mode: str, call: Callable[..., Any]) -> Mode:
        model, first = self.model, self.model[0]
        default = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None
        prompt = model.prompts.get(mode, default)
        # The first module may have separate limits for queries and documents.
        mode_limit = getattr(first, f"{mode}_length", None) if mode in (QUERY, DOCUMENT) else None
        copies = 1
        if isinstance(first, CausalModule):
            limit = first.max_tokens(prompt or "", mode_limit) or NO_LIMIT
            copies = sum(template.copies for template in first.layouter.templates)
        else:
            read = min(model.max_seq_length or NO_LIMIT, mode_limit or NO_LIMIT)
            limit = max(0, read - _token_count(model.preprocess([""], prompt=prompt)))
        return Mode(partial(self._run, call), limit, _token_count(model.preprocess(["a"], prompt=prompt)), copies)

    def measure(self, mode: str, items: Sequence[Any], first: int = 0) -> list[SizedItem]:
        _, limit, added, copies = self.modes[mode]
        sized = []
        for index, text in enumerate(items, first):
            where = f"'input'[{index}]"
            part, length = self.tokenizer.cut(text, limit, where)
            tokens = self._tokens_read(length, limit, where)
            sized.append(SizedItem(part, tokens, added + copies * tokens))
        return sized

    def truncate_vector(self, vector: np.ndarray, dimensions: int | None) -> np.ndarray:
        """Return the first values of a vector, normalized again if the model normalizes."""
        if dimensions is None:
            return vector
        first = torch.from_numpy(vector[:dimensions])
        return (torch.nn.functional.normalize(first, dim=0) if self._normalizes else first).numpy()

    def _run(self, call: Callable[..., Any], texts: list[str]) -> Sequence[np.ndarray]:
        vectors = call(texts, batch_size=len(texts), show_progress_bar=False)
        return list(_check_finite(vectors.astype(np.float32, copy=False), "vector of this text"))


class Reranker(Served):
    """CrossEncoder with the scores of ``predict``.

    Raises:
        ValueError: If the model does not return one score per pair.
    """

    def __init__(self, name: str, model: CrossEncoder, truncate: bool = True) -> None:
        if model.num_labels != 1:
            raise ValueError(f"The model {name} returns {model.num_labels} scores per pair. Serve one with one score.")
        self.model = model
        self._document_limit = model.max_seq_length or NO_LIMIT
        added = _token_count(model.preprocess([("a", "a")]))
        pair_limit = max(0, self._document_limit - max(0, added - 2))
        super().__init__(name, model.tokenizer, truncate, {"": Mode(self._run, pair_limit, added)})
        self._run([("a", "a")])

    def items(self, query: str, documents: Sequence[Any]) -> list[tuple[str, ...]]:
        """Return the items of a request: pairs, which may run in different batches."""
        return [(query, document) for document in documents]

    def measure(self, mode: str, items: Sequence[Any], first: int = 0) -> list[SizedItem]:
        _, limit, added, _ = self.modes[mode]
        query, used = self.tokenizer.cut(items[0][0], self._document_limit, "'query'")
        sized = []
        for index, (_, document) in enumerate(items, first):
            where = f"'documents'[{index}]"
            part, length = self.tokenizer.cut(document, self._document_limit, where)
            tokens = self._tokens_read(used + length, limit, where)
            sized.append(SizedItem((query, part), tokens, added + tokens))
        return sized

    def _run(self, pairs: Any) -> Sequence[Any]:
        predicted = self.model.predict(pairs, batch_size=len(pairs), show_progress_bar=False)
        scores: list[float] = _check_finite(np.asarray(predicted, dtype=np.float32), "score of this document").tolist()
        return scores


class ListReranker(Reranker):
    """:class:`AttentionReranker`, which reads all documents of a request together, as one item.

    It refuses a query that leaves no room for a document, and more tokens than :data:`MAX_CACHED_VALUES` allows.
    """

    def __init__(self, name: str, model: AttentionReranker, truncate: bool = True) -> None:
        module = model[0]
        assert isinstance(module, AttentionRerankModule)
        self.model, self._rotations = model, module.rotations
        self._query_limit = module.lm.positions or NO_LIMIT
        self._document_limit = min(self._query_limit, module.max_seq_length or NO_LIMIT)
        config = module.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._max_tokens = MAX_CACHED_VALUES // (2 * config.num_hidden_layers * heads * size)
        Served.__init__(self, name, model.tokenizer, truncate, {"": Mode(self._run, NO_LIMIT, 0, self._rotations)})
        self._run([("a", "a", "b")])

    def items(self, query: str, documents: Sequence[Any]) -> list[tuple[str, ...]]:
        """Return one item with all documents."""
        return [(query, *documents)]

    def measure(self, mode: str, items: Sequence[Any], first: int = 0) -> list[SizedItem]:
        [(query, *documents)] = items
        # The model itself refuses a query that is too long.
        query, query_length = self.tokenizer.cut(query, self._query_limit, "'query'")
        parts, tokens = [], 0
        for index, document in enumerate(documents):
            where = f"'documents'[{index}]"
            part, length = self.tokenizer.cut(document, self._document_limit, where)
            parts.append(part)
            tokens += self._tokens_read(length, self._document_limit, where)
        if tokens > self._max_tokens:
            message = f"'documents' have {tokens:,} tokens; the limit is {self._max_tokens:,}: send fewer documents."
            raise RefusedError(400, message, param="documents")
        return [SizedItem((query, *parts), query_length + tokens, self._rotations * (2 * query_length + tokens))]

    def _run(self, lists: Any) -> Sequence[Any]:
        scores = []
        for query, *documents in lists:
            try:
                scores.append(super()._run([(query, document) for document in documents]))
            except ValueError as error:
                # The query leaves no room for a document.
                raise RefusedError(400, str(error), param="query", code="context_length_exceeded") from error
        return scores


class TokenizerCopy:
    """Copy of a tokenizer, which threads can use while the model sets the truncation of the original.

    Args:
        tokenizer: Tokenizer of transformers, or of ``tokenizers`` as in ``StaticEmbedding``.
        count_all: Whether to count all tokens of a text.

    Attributes:
        tokenizer: The copy.
    """

    def __init__(self, tokenizer: Any, count_all: bool = False) -> None:
        self._count_all = count_all
        self._from_end = getattr(tokenizer, "truncation_side", "right") == "left"
        self.tokenizer: Any = copy.deepcopy(tokenizer)
        if isinstance(tokenizer, Tokenizer):
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without truncation and special tokens."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return getattr(encoding, "ids", encoding)

    def cut(self, text: str, limit: int, where: str) -> tuple[str, int]:
        """Return the part of a text that determines the tokens within a limit, and its number of tokens.

        Tokenizers read a whole text before they truncate it, a second for a million characters. So only a part is
        tokenized, and a larger part if it has too few tokens, because tokenizers may drop characters such as spaces.
        The first ``limit`` tokens of the part are those of the text, unless they depend on characters more than 256
        tokens later.

        Args:
            text: The text.
            limit: Number of tokens that the model reads.
            where: Name of the text in its request.

        Raises:
            RefusedError: If the tokens to read or count are not within the first :data:`MAX_CHARACTERS` characters.
        """
        wanted = limit + _MARGIN
        first = _CHARACTERS_PER_TOKEN * wanted
        most = MAX_CHARACTERS if limit >= _UNLIMITED else max(MAX_CHARACTERS, first)
        sizes = [most] if self._count_all or first > most else [first, most]
        for size in sizes:
            part = text[-size:] if self._from_end else text[:size]
            count = len(self.ids(part))
            if len(part) == len(text) or (count >= wanted and not self._count_all):
                return part, count
        raise _too_long(where, f"has {len(text):,} characters, of which {most:,} are tokenized: send it in parts.")


def load_reranker(name: str, path: str, device: str, dtype: str, truncate: bool) -> Reranker:
    """Load a CrossEncoder or an AttentionReranker.

    Raises:
        ValueError: If the model is neither.
    """
    check_kind(path, "CrossEncoder")
    settings: dict[str, Any] = {"device": device, "model_kwargs": {"dtype": dtype}}
    if loading_class(path) == BY_ATTENTION:
        return ListReranker(name, AttentionReranker(path, **settings), truncate)
    return Reranker(name, CrossEncoder(path, **settings), truncate)


def check_kind(path: str, expected: str, revision: str | None = None) -> None:
    """Check that a model is saved as the expected class of sentence-transformers.

    Raises:
        ValueError: If it is another class.
    """
    # None: a language model, or a CrossEncoder that transformers saved.
    kind = saved_class(path, revision)
    if kind not in (None, expected):
        hints = {"CrossEncoder": "Give it as --rerank", "SentenceTransformer": "Give it as MODEL, without --rerank"}
        hint = hints.get(kind, f"Give a {' or a '.join(hints)}, or use it in your own program")
        raise ValueError(f"The model {path} is a saved {kind}. {hint}.")


def share(model: nn.Module, whole: nn.Module) -> str:
    """Let a model read the weights of another, if all of its own are equal to them.

    Returns:
        Name of the first weight that differs; empty if none does.
    """
    others = dict(whole.named_parameters())
    for name, weight in model.named_parameters():
        other = others.get(name)
        if other is None or other.dtype != weight.dtype or not torch.equal(other, weight):
            return name
    for name, weight in model.named_parameters():
        weight.data = others[name].data
    return ""


def _too_long(where: str, reason: str) -> RefusedError:
    return RefusedError(400, f"{where} {reason}", param=where.split("'")[1], code="context_length_exceeded")


def _check_finite(values: np.ndarray, what: str) -> np.ndarray:
    if not np.isfinite(values).all():
        raise RefusedError(500, f"The model's {what} has values that are not finite.")
    return values


def _token_count(features: dict[str, Any]) -> int:
    """Return the number of tokens, padding included."""
    ids = features.get("input_ids")
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0
