"""Saved models as a server runs them: texts to vectors, and pairs to scores, with what each costs in tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Normalize
from tokenizers import Tokenizer

from ..hub.push import BY_ATTENTION, ENCODERS, loading_class, saved_class
from ..lm.backbone import positions
from ..modules import AttentionReranker, AttentionRerankModule, CausalModule, EndpointTransformer, PromptRepsModule
from .forms import RefusedError, shortened

#: A text, or its tokens.
SequenceT = TypeVar("SequenceT", str, list[int])

#: What others call a text that is asked for, and one that is searched.
_INPUT_TYPES = {"search_query": "query", "search_document": "document", "passage": "document"}
#: Those for which ST has methods.
QUERY, DOCUMENT = "query", "document"

# What a text is cut to at first, for each token that the model reads; twice as much while that is too little.
_CHARACTERS = 8
# Tokens behind those that the model reads. A cut changes the tokens that stand before it, at most those of one word:
# WordPiece takes one of more than 100 characters for unknown.
_BEHIND = 256
#: Characters of a text that are tokenised to find out which the model reads; more only if 8 for each of its tokens are.
CHARACTERS = 2**20


class Sized(NamedTuple):
    """What is about to be run.

    Attributes:
        item: A text, or a pair, without most of what the model would not read.
        read: Tokens of it that the model reads, without what it puts around them.
        cost: Tokens that run for it.
    """

    item: Any
    read: int
    cost: int


class Way(NamedTuple):
    """A way in which a model reads texts.

    Attributes:
        run: Items to results; what has one ``run`` may share a batch.
        limit: Tokens of an item that are read; None: no limit.
        around: Tokens that run beside those of an item.
        copies: How many tokens run for each of an item.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    limit: int | None
    around: int
    copies: int = 1


#: Values in the keys and values of one request's documents, where they are read together: 2 GiB in float32.
KEPT_VALUES = 2**29


class Served:
    """A model by name, and the ways in which it reads texts.

    Args:
        name: What requests call it.
        tokenizer: The model's.
        truncate: Whether texts that are too long are cut, or refused.
        ways: By what stands behind a colon in a name; "" is the plain one.
    """

    #: Values of a result for each token that the model reads; 0: the results of all texts are of one size.
    values_per_token = 0

    def __init__(self, name: str, tokenizer: Any, truncate: bool, ways: dict[str, Way]) -> None:
        self.name, self.ways = name, ways
        self.tokens = OwnTokenizer(tokenizer)
        self._truncate = truncate

    @property
    def names(self) -> list[str]:
        """All that requests may call it."""
        return [self.name, *(f"{self.name}:{way}" for way in self.ways if way)]

    def guess(self, way: str, items: Sequence[Any]) -> int:
        """About how many tokens run for items that are not tokenised yet: one for four characters."""
        _, limit, around, copies = self.ways[way]
        read = 0
        for item in items:
            characters = sum(map(len, item)) if isinstance(item, tuple) else len(item)
            length = characters if isinstance(item, list) else characters // 4
            read += length if limit is None else min(length, limit)
        return around * len(items) + copies * read

    def _read(self, length: int, limit: int | None, where: str, truncate: bool) -> int:
        """How many tokens the model reads of a text that has so many, or of whose beginning has more than it reads."""
        if limit is not None and length > limit and not truncate:
            raise _too_long(where, f"has {length} tokens, and the model reads {limit}: send it in parts.")
        return length if limit is None else min(length, limit)


def _too_long(where: str, said: str) -> RefusedError:
    return RefusedError(400, f"{where} {said}", param=where.split("'")[1], code="context_length_exceeded")


#: What has ``encode``, ``encode_query``, ``encode_document`` and ``similarity``.
AnyEncoder = SentenceTransformer | SparseEncoder | MultiVectorEncoder


class Embedder(Served):
    """A SentenceTransformer, which gives what its ``encode``, ``encode_query`` and ``encode_document`` give.

    Raises:
        ValueError: If the model does not give one vector a text.
    """

    #: The path that answers with what the model gives a text, and what that is.
    path, gives = "/v1/embeddings", "one vector"

    def __init__(self, name: str, model: AnyEncoder, truncate: bool = True) -> None:
        if isinstance(model[0], EndpointTransformer):
            raise ValueError(
                f"{name}: its texts are sent to {model[0].url}, and what stands before a server is not served here. "
                "Use st-reba encode, or SentenceTransformer in your own program."
            )
        self.model = model
        self._normalizes = any(isinstance(module, Normalize) for module in model.children())
        default = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None
        calls: dict[str, Callable[..., Any]] = {
            "": model.encode, QUERY: model.encode_query, DOCUMENT: model.encode_document
        }  # fmt: skip
        for prompt_name in model.prompts:
            calls.setdefault(prompt_name, partial(model.encode, prompt_name=prompt_name))
        ways = {
            way: self._way(way, call, model.prompts.get(way, default) if way else default)
            for way, call in calls.items()
        }
        # PromptReps weighs the words of the whole text, however few of its tokens are read.
        self._needs_all = isinstance(model[0], PromptRepsModule)
        super().__init__(name, model.tokenizer, truncate, ways)
        # Every kernel is loaded before the first request, and what is no embedder shows.
        self.dimensions = int(ways[""].run(["a"])[0].shape[-1])

    def _way(self, way: str, call: Callable[..., Any], prompt: str | None) -> Way:
        first, limit = self.model[0], self.model.max_seq_length
        around = _cells(self.model.preprocess(["a"], prompt=prompt))
        # The first module may have a length of its own for each.
        of_way = getattr(first, f"{way}_length", None) if way in (QUERY, DOCUMENT) else None
        if isinstance(first, CausalModule):
            limit = first.max_tokens(prompt, None if of_way is None else {"text": {"max_length": of_way}})
        elif limit is not None:
            ends = _cells(self.model.preprocess([""], prompt=prompt))
            limit = None if limit > 10**9 else max(0, min(limit, of_way or limit) - ends)
        copies = int(getattr(first, "copies", 1)) * int(getattr(first, "rows_per_text", 1))
        return Way(partial(self._run, call), limit, around, copies)

    def way(self, suffix: str, input_type: str | None, field: str = "input_type") -> str:
        """The one that a request asks for.

        Args:
            suffix: Of the model's name.
            input_type: Of the request.
            field: Where in the request that stands.

        Raises:
            RefusedError: If there is none of that name, or two are asked for.
        """
        if input_type is None:
            return suffix
        way = _INPUT_TYPES.get(input_type, input_type)
        if way not in self.ways or not way:
            names = ", ".join(f'"{way}"' for way in self.ways if way)
            said = f"'{field}' is \"{shortened(input_type)}\": this model has {names}."
            raise RefusedError(400, said, param=field)
        if suffix and way != suffix:
            said = f'The model\'s name asks for "{suffix}" and \'input_type\' for "{way}": give one of them.'
            raise RefusedError(400, said, param="input_type")
        return way

    def measure(
        self,
        way: str,
        items: Sequence[str | list[int]],
        first: int = 0,
        field: str = "input",
        truncate: bool | None = None,
    ) -> list[Sized]:
        """How many tokens items have.

        Args:
            way: The way.
            items: A part of a request's: texts, or the token ids of texts.
            first: Where in the request they begin.
            field: Of the request, in which they stand.
            truncate: Whether those that are too long are cut, or refused; None: as everywhere.

        Raises:
            RefusedError: If one is longer than the model reads, and is not to be cut; or is longer than can be read;
                or token ids are those of no text.
        """
        _, limit, around, copies = self.ways[way]
        truncate = self._truncate if truncate is None else truncate
        found = []
        for index, item in enumerate(items, first):
            where = f"'{field}'[{index}]"
            text = item if isinstance(item, str) else self.tokens.text(item, None if self._needs_all else limit, where)
            part, length = self.tokens.cut(text, limit, where, whole=self._needs_all or not truncate)
            read = self._read(length if isinstance(item, str) else len(item), limit, where, truncate)
            found.append(Sized(part, read, around + copies * read))
        return found

    def first(self, vector: np.ndarray, dimensions: int | None) -> np.ndarray:
        """A vector's first values, of length 1 again if the model normalizes: ``encode(truncate_dim=...)`` of it."""
        if dimensions is None:
            return vector
        first = torch.from_numpy(vector[:dimensions])
        return (torch.nn.functional.normalize(first, dim=0) if self._normalizes else first).numpy()

    def similarities(self, query: Any, documents: Sequence[Any]) -> list[float]:
        """Of what one text is given to what others are, as the model compares them."""
        found: list[float] = self.model.similarity([query], list(documents))[0].tolist()
        return found

    def _run(self, call: Callable[..., Any], texts: list[str]) -> Sequence[Any]:
        vectors = np.asarray(call(texts, batch_size=len(texts), show_progress_bar=False))
        if vectors.ndim != 2:
            raise ValueError(f"The model {self.name} does not give one vector a text: serve one that does.")
        vectors = vectors.astype(np.float32, copy=False)
        _check_finite(bool(np.isfinite(vectors).all()))
        return list(vectors)

    def shown(self, found: Any) -> list[Any]:
        """What a text is given, as the path's answer has it."""
        values: list[float] = found.tolist()
        return values


class SparseEmbedder(Embedder):
    """A SparseEncoder, which gives each text a sparse tensor (V,): the weights of tokens of a vocabulary."""

    path, gives = "/embed_sparse", "the weights of tokens"

    def _run(self, call: Callable[..., Any], texts: list[str]) -> Sequence[torch.Tensor]:
        found = call(texts, batch_size=len(texts), show_progress_bar=False, save_to_cpu=True).float().coalesce()
        _check_finite(bool(found.values().isfinite().all()))
        return list(found)

    def shown(self, found: torch.Tensor) -> list[dict[str, Any]]:
        """As for :class:`Embedder`: the tokens whose weights are not 0."""
        found = found.coalesce()
        pairs = zip(found.indices()[0].tolist(), found.values().tolist(), strict=True)
        return [{"index": index, "value": value} for index, value in pairs]


class MultiVectorEmbedder(Embedder):
    """A MultiVectorEncoder, which gives each text an array (n, D): a vector for each of its tokens that counts."""

    path, gives = "/embed_all", "a vector for each token"

    def __init__(self, name: str, model: MultiVectorEncoder, truncate: bool = True) -> None:
        super().__init__(name, model, truncate)
        self.values_per_token = self.dimensions

    def _run(self, call: Callable[..., Any], texts: list[str]) -> Sequence[np.ndarray]:
        found = call(texts, batch_size=len(texts), show_progress_bar=False, convert_to_numpy=True)
        _check_finite(all(bool(np.isfinite(vectors).all()) for vectors in found))
        return [vectors.astype(np.float32, copy=False) for vectors in found]


def _check_finite(finite: bool) -> None:
    if not finite:
        raise RefusedError(500, "The model's vector of this text has values that are no numbers.")


class Reranker(Served):
    """A CrossEncoder, which gives what its ``predict`` gives.

    Raises:
        ValueError: If it gives something else than one score a pair.
    """

    def __init__(self, name: str, model: CrossEncoder, truncate: bool = True) -> None:
        if isinstance(model, AttentionReranker):
            raise ValueError(f"The model {name} scores the documents of a query together: give it to ListReranker.")
        if model.num_labels != 1:
            raise ValueError(f"The model {name} gives {model.num_labels} scores a pair: to order texts needs one.")
        self.model = model
        around, limit = _cells(model.preprocess([("a", "a")])), model.max_seq_length
        self._document_limit = None if limit is None or limit > 10**9 else int(limit)
        both = None if self._document_limit is None else max(0, self._document_limit - max(0, around - 2))
        super().__init__(name, model.tokenizer, truncate, {"": Way(self._run, both, around)})
        first = next(iter(model.children()), None)
        # A recipe's limit is that of documents; a query that does not fit is no text to be cut.
        self._query_limit = positions(first.model) if isinstance(first, CausalModule) else self._document_limit
        self._run([("a", "a")])

    def items(self, query: str, documents: Sequence[Any]) -> list[tuple[str, ...]]:
        """What of a request is run, each by itself: pairs."""
        return [(query, document) for document in documents]

    def scores(self, results: list[Any]) -> list[float]:
        """Of the documents, from what running the items gave."""
        return results

    def measure(self, way: str, items: Sequence[tuple[str, ...]], first: int = 0) -> list[Sized]:
        """As for :class:`Embedder`."""
        limit, around = self.ways[way].limit, self.ways[way].around
        query, asked = self.tokens.cut(items[0][0], self._query_limit, "'query'", whole=not self._truncate)
        found = []
        for index, (_, document) in enumerate(items, first):
            where = f"'documents'[{index}]"
            part, length = self.tokens.cut(document, self._document_limit, where, whole=not self._truncate)
            read = self._read(asked + length, limit, where, self._truncate)
            found.append(Sized((query, part), read, around + read))
        return found

    def _run(self, pairs: Any) -> Sequence[Any]:
        found = self.model.predict(pairs, batch_size=len(pairs), show_progress_bar=False)
        scores = np.asarray(found, dtype=np.float32)
        if not np.isfinite(scores).all():
            raise RefusedError(500, "The model's score of this document is no number.")
        return scores.tolist()


class ListReranker(Reranker):
    """An :class:`AttentionReranker`: the documents of a request are one item, a query and its documents, read together.

    A query that leaves no room for a document is refused, and so are more tokens than :data:`KEPT_VALUES` allows.
    Documents are cut as the model cuts them, or refused.
    """

    def __init__(self, name: str, model: AttentionReranker, truncate: bool = True) -> None:
        module = model[0]
        assert isinstance(module, AttentionRerankModule)
        self.model, self._rotations = model, module.rotations
        prompt = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None
        empty = module.preprocess([("", "")], prompt=prompt)
        self._separator = len(empty["separator"])
        self._around = len(empty["front"]) + max(len(ids) for ids, _ in empty["asked"])
        available = positions(module.model)
        self._room = None if available is None else available - self._around - self._separator
        self._document_limit = module.max_seq_length
        config = module.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._most = KEPT_VALUES // (2 * config.num_hidden_layers * heads * size)
        Served.__init__(
            self, name, model.tokenizer, truncate, {"": Way(self._run, None, self._around, self._rotations)}
        )
        self._run([("a", "a", "b")])

    def items(self, query: str, documents: Sequence[Any]) -> list[tuple[str, ...]]:
        """One: all of them."""
        return [(query, *documents)]

    def scores(self, results: list[Any]) -> list[float]:
        """Those of the one item."""
        [found] = results
        return list(found)

    def measure(self, way: str, items: Sequence[tuple[str, ...]], first: int = 0) -> list[Sized]:
        """As for :class:`Embedder`."""
        [(query, *documents)] = items
        query, asked = self.tokens.cut(query, self._room, "'query'", whole=True)
        if self._room is not None and asked >= self._room:
            raise _too_long("'query'", f"has {asked} tokens, and the model reads {self._room - 1}: shorten it.")
        room = None if self._room is None else self._room - asked
        limit = min((each for each in (room, self._document_limit) if each is not None), default=None)
        parts, read = [], 0
        for index, document in enumerate(documents):
            where = f"'documents'[{index}]"
            part, length = self.tokens.cut(document, limit, where, whole=not self._truncate)
            parts.append(part)
            read += self._read(length, limit, where, self._truncate)
        if read > self._most:
            said = f"'documents' have {read:,} tokens, and are read together, {self._most:,} at most: send fewer."
            raise RefusedError(400, said, param="documents")
        cost = self._rotations * (self._around + 2 * asked + self._separator * len(documents) + read)
        return [Sized((query, *parts), asked + read, cost)]

    def _run(self, lists: Any) -> Sequence[Any]:
        return [super(ListReranker, self)._run([(query, text) for text in documents]) for query, *documents in lists]


class OwnTokenizer:
    """A tokenizer of its own: one cannot be used by two threads while one of them sets how it truncates.

    Args:
        tokenizer: Transformers', or a bare one of ``tokenizers``, as ST's ``StaticEmbedding`` has.
    """

    def __init__(self, tokenizer: Any) -> None:
        inner: Any = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
        self._fast = isinstance(inner, Tokenizer)
        self._from_end = getattr(tokenizer, "truncation_side", "right") == "left"
        self._tokenizer: Any = copy.deepcopy(inner if self._fast else tokenizer)
        if self._fast:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, whole, without special tokens."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return found.ids if self._fast else found

    def cut(self, text: str, limit: int | None, where: str, whole: bool = False) -> tuple[str, int]:
        """What of a text decides the tokens that a model reads, and how many tokens that has.

        A tokenizer reads a text as a whole before it cuts it, and needs a second for a million characters. So only a
        part is tokenised, and a larger one where that has too few tokens: tokenizers may drop any number of characters,
        such as blanks. The first ``limit`` tokens of the part are those of the text, but for a text whose tokens depend
        on characters more than 256 tokens behind them.

        Args:
            text: The text.
            limit: Tokens that the model reads of it; None: all.
            where: The text in its request.
            whole: Whether all tokens of the text are to be counted.

        Raises:
            RefusedError: If a text is longer than :data:`CHARACTERS`, and so many do not have the tokens that are read
                or counted.
        """
        wanted = None if limit is None or whole else limit + _BEHIND
        most = CHARACTERS if limit is None else max(CHARACTERS, _CHARACTERS * (limit + _BEHIND))
        size = most if wanted is None else _CHARACTERS * wanted
        while True:
            part = self._kept(text, size)
            count = len(self.ids(part))
            if len(part) == len(text) or (wanted is not None and count >= wanted):
                return part, count
            if size >= most:
                raise _too_long(
                    where,
                    f"has {len(text):,} characters, and {size:,} of them, which is as far as the server looks, do not "
                    "have all tokens that the model reads: send it in parts.",
                )
            size *= 2

    def _kept(self, whole: SequenceT, size: int) -> SequenceT:
        """What truncation keeps."""
        return whole[max(0, len(whole) - size) :] if self._from_end else whole[:size]

    def text(self, ids: list[int], limit: int | None, where: str) -> str:
        """The text that tokens stand for; the special tokens at its ends are left out, as the model adds its own.

        Args:
            ids: The tokens.
            limit: How many of them the model reads; None: all. Of more, those that decide these are taken.
            where: The tokens in their request.

        Raises:
            RefusedError: If one is no token, or the tokens are not those of that text: the model reads texts, and would
                read other tokens than were sent.
        """
        size = self._tokenizer.get_vocab_size(with_added_tokens=True) if self._fast else len(self._tokenizer)
        said = "these are not the tokens that the model's own tokenizer makes of any text"
        wrong = next((index for index, own in enumerate(ids) if not 0 <= own < size), None)
        if wrong is None:
            begin, end = 0, len(ids)
            while begin < end and ids[begin] in self._special:
                begin += 1
            while begin < end and ids[end - 1] in self._special:
                end -= 1
            # One behind the limit may be a part of a character.
            read = end - begin if limit is None else limit
            inner = self._kept(ids[begin:end], read + _BEHIND)
            text: str = self._tokenizer.decode(inner, skip_special_tokens=False)
            if self._kept(self.ids(text), read) == self._kept(inner, read):
                return text
        else:
            shown = ids[wrong] if abs(ids[wrong]) < 10**9 else "huge"
            said = f"token {wrong} is {shown}, and the vocabulary has {size}"
        raise RefusedError(
            400,
            f"{where}: {said}. Send the text, or tokens of the model's own tokenizer (some clients send those of "
            "OpenAI's models: tell them not to).",
            param=where.split("'")[1],
        )


#: By the class that a model is saved as: how one that embeds is served.
EMBEDDERS: dict[str, type[Embedder]] = {
    "SentenceTransformer": Embedder, "SparseEncoder": SparseEmbedder, "MultiVectorEncoder": MultiVectorEmbedder,
}  # fmt: skip


def load_embedder(name: str, path: str, revision: str | None, device: str, dtype: str, truncate: bool) -> Embedder:
    """A saved model that embeds.

    Raises:
        ValueError: If it is none.
    """
    kind = check_kind(path, revision, *EMBEDDERS)
    model = ENCODERS[kind](path, revision=revision, device=device, model_kwargs={"dtype": dtype})
    return EMBEDDERS[kind](name, model, truncate)


def load_reranker(name: str, path: str, revision: str | None, device: str, dtype: str, truncate: bool) -> Reranker:
    """A saved CrossEncoder, or an AttentionReranker, which is saved as one.

    Raises:
        ValueError: If it is none.
    """
    check_kind(path, revision, "CrossEncoder")
    given: dict[str, Any] = {"revision": revision, "device": device, "model_kwargs": {"dtype": dtype}}
    if loading_class(path, revision) == BY_ATTENTION:
        return ListReranker(name, AttentionReranker(path, **given), truncate)
    return Reranker(name, CrossEncoder(path, **given), truncate)


#: What is served, and how it is asked for.
_HINTS = {
    "CrossEncoder": "it orders texts: give it as --rerank",
    **dict.fromkeys(EMBEDDERS, "it gives vectors: give it as MODEL, without --rerank"),
}


def check_kind(path: str, revision: str | None, *wanted: str) -> str:
    """Which of the wanted classes of sentence-transformers' a model is saved as; the first if nobody knows.

    Raises:
        ValueError: If it is saved as another one.
    """
    kind = saved_class(path, revision)
    if kind is None:
        # A bare language model, which is no embedder, or a CrossEncoder saved as transformers' classifier alone.
        return wanted[0]
    if kind not in wanted:
        hint = _HINTS.get(kind, f"serve takes one of {', '.join(_HINTS)}")
        raise ValueError(f"The model {path} is a saved {kind}; {hint}.")
    return kind


def _cells(features: dict[str, Any]) -> int:
    """Tokens that run."""
    ids = features.get("input_ids")
    return int(ids.numel()) if isinstance(ids, torch.Tensor) else 0
