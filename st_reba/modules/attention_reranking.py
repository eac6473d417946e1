"""In-context reranking: documents are ordered by the attention that a query's tokens pay to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from sentence_transformers import CrossEncoder
from torch import Tensor, nn
from transformers import DynamicCache

from ..lm.attention.kernels import LogWeights
from ..lm.model import LanguageModel
from ..lm.passes import AttentionCall, Hook
from ..lm.prefixes import cache_arguments, read_only_cache
from ..settings import NO_LIMIT, check, check_flag, check_int, check_tokens
from ..text.layout import NOT_TEXT, Layout
from ..text.templates import check_template_length
from ..text.tokens import special_tokens, tokenize
from .transformer import ModelSource, SafeTransformer

#: The paper's prompt, in other words.
TEMPLATE = (
    "Here are some paragraphs:{documents}\n\nFind what is relevant to the following query in the paragraphs above."
    "\n\nQuery: {query}"
)
#: Text before each document.
SEPARATOR = "\n\n"
#: Query without content, whose attention is subtracted.
CONTENT_FREE = "N/A"
#: A token counts unless its score is this many standard deviations below the mean of its document.
DEVIATIONS = 2.0
#: Number of middle layers, in which attention to relevant documents is highest.
MIDDLE = 4


@dataclass(frozen=True)
class ReadDocuments:
    """Keys and values of documents, side by side, for any number of queries.

    Attributes:
        layers: Keys and values of each layer, (1, G, K, d): of the text before all documents, then of each document.
        positions: Position of each token, (K,).
        spans: Slice of each document's tokens among the K.
        start: First position after all documents.
    """

    layers: Sequence[tuple[Tensor, Tensor]]
    positions: Tensor
    spans: Sequence[slice]
    start: int


@dataclass(eq=False)
class DocumentMask(Hook):
    """Mask of new tokens after documents that are side by side: each has its own positions.

    Attributes:
        documents: The documents.
    """

    documents: ReadDocuments

    layers = None

    def before_attention(self, call: AttentionCall) -> None:
        device = call.query.device
        new = self.documents.start + torch.arange(call.query.shape[2], device=device)
        distance = new[:, None] - torch.cat([self.documents.positions.to(device), new])
        seen = distance >= 0
        if call.window is not None:
            seen = seen & (distance < call.window)
        call.mask, call.causal = seen[None, None], False


@dataclass(eq=False)
class MeanOverQueries(Hook):
    """Keep the weights of the first keys in each head, averaged over some queries of each row.

    Attributes:
        layers: Indices of the layers.
        queries: (B, Q), True for queries that count.
        keys: Number of keys, K.
        means: By layer, (B, H, K), after the pass.
    """

    layers: Collection[int] = field()
    queries: Tensor
    keys: int
    means: dict[int, Tensor] = field(default_factory=dict, init=False)

    def after_attention(self, call: AttentionCall, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        share = (self.queries / self.queries.sum(dim=1, keepdim=True)).to(lse)
        weights = LogWeights.of(call, lse)
        # One key-value head at a time, which bounds the memory of (B, 1, K, H / G, Q).
        parts = [weights.form(groups=slice(g, g + 1), keys=slice(self.keys)).exp() for g in range(call.key.shape[1])]
        means = [torch.einsum("bgkrq,bq->bgrk", part, share) for part in parts]
        self.means[call.layer] = torch.cat(means, dim=1).flatten(1, 2)
        return output, lse


class AttentionRerankModule(SafeTransformer):
    r"""The attention that a query's tokens pay to each document of a list, less that of a query without content.

    .. math:: s_i = \sum_{t \in D_i} (a_t(q) - a_t(\text{N/A})), \quad
        a_t(q) = \sum_{l, h} \frac{1}{|q|} \sum_{j \in q} A^{(l, h)}_{jt}

    over the chosen layers l and heads h, where all documents precede the query in one prompt. Tokens that score less
    than their document's mean less two standard deviations do not count. Nothing is generated, and no map is stored.
    Keys and values of the documents are computed once, and the query and "N/A" continue them.

    A score is relative to the other documents of its list, so all documents of a query are scored together.
    :class:`AttentionReranker` does that; a plain ``CrossEncoder``, which divides lists into batches, is refused.

    Args:
        model_name_or_path: Path or Hub id of a decoder-only model, or a loaded ``Transformer``, whose weights are
            shared.
        template: Text with one ``{documents}`` and, after it, one ``{query}``. Attention is read from the query's first
            token to the end of the template.
        layers: Layers whose attention counts: ``"middle"``, four in the middle of those without a sliding window;
            ``"all"``; or indices, negative ones from the top. Layers above the last of them do not run, and are not
            saved.
        heads: Pairs of a layer and a head that count, in place of ``layers``.
        together: True: the documents are read one after the other, and see those before them. False: each is read
            alone, at the same positions, so that their order changes nothing but rounding. The ranking is then worse.
        rotations: With ``together``, number of times that the list is read, each time starting with another document;
            scores are means. With as many as there are documents, each has every place once.
        block_tokens: With ``together``, number of tokens that are read together. A longer list is divided into blocks
            that are side by side, and the query sees all of them in one softmax. None: the number of positions.
        **transformer_kwargs: As for ``Transformer``; ``max_seq_length`` truncates each document.

    Raises:
        ValueError: If a setting is out of range, or the model's attention cannot be watched behind a cache.
    """

    config_keys = [
        *SafeTransformer.config_keys, "template", "layers", "heads", "together", "rotations", "block_tokens",
    ]  # fmt: skip
    method = "In-context reranking"
    equation = r"s_i = \sum_{t \in D_i} (a_t(q) - a_t(\text{N/A}))"
    citation: ClassVar[str] = (
        "Shijie Chen, Bernal Jiménez Gutiérrez, Yu Su: Attention in Large Language Models Yields Efficient Zero-Shot "
        "Re-Rankers. arXiv:2410.02642, 2024."
    )
    cost = "One pass over all documents of a query, and two over the query, through the layers up to the last chosen."

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        template: str = TEMPLATE,
        layers: Literal["middle", "all"] | Sequence[int] = "middle",
        heads: Sequence[Sequence[int]] | None = None,
        together: bool = True,
        rotations: int = 1,
        block_tokens: int | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        check("template", template, isinstance(template, str), "give a string.")
        check_template_length([template])
        slots = re.fullmatch(r"([^{}]*)\{documents\}([^{}]*)\{query\}([^{}]*)", template)
        advice = "give text with one {documents} and, behind it, one {query}; no other braces."
        check("template", template, slots is not None, advice)
        self._before, self._between, self._end = cast(re.Match[str], slots).groups()
        self.template = template
        self.rotations = check_int("rotations", rotations, 1, 64)
        self.together = check_flag("together", together)
        self.block_tokens = check_tokens("block_tokens", block_tokens)
        advice = "documents that are read alone have no order and no blocks. Set together=True, or leave it out."
        check("rotations", rotations, together or rotations == 1, advice)
        check("block_tokens", block_tokens, together or block_tokens is None, advice)
        super().__init__(model_name_or_path, **transformer_kwargs)
        self.heads = None if heads is None else _check_heads(heads, self.model.config)
        if self.heads is not None:
            layers = [layer for layer, _ in self.heads]
        elif layers == "middle":
            layers = middle(self.model.config)
        self.lm = LanguageModel(self.model)
        #: Indices of the layers, which mean the same in the saved model.
        self.layers = list(self.lm.resolve(layers, "watched"))
        self.lm = LanguageModel(self.lm.model, self.layers[-1] + 1)
        self.model = self.lm.model
        self.model.config.use_cache = False
        self.missing_weights.check(self.model)
        if not self.lm.continues_past:
            problem = f"{type(self.model).__name__}: its attention cannot be watched behind documents that it has read."
            raise ValueError(f"{problem} Use another architecture, such as Llama, Qwen, Mistral or Gemma.")

    def on_model_ready(self, model: Any) -> None:
        """Refuse a plain ``CrossEncoder``. sentence-transformers calls it on a complete model.

        Raises:
            ValueError: If the model is one: its batches would divide lists.
        """
        if isinstance(model, CrossEncoder) and not isinstance(model, AttentionReranker):
            raise ValueError(
                "AttentionRerankModule scores all documents of a query together, and a CrossEncoder scores pairs in "
                "batches. Load it with st_reba.AttentionReranker(path), which has the same rank and predict."
            )
        super().on_model_ready(model)

    def _asked(self, query: str) -> tuple[list[int], list[bool]]:
        """Return the tokens after all documents, and which of them are part of the query or follow it."""
        [tokens] = tokenize(self._tokenizer, [self._between + query + self._end])
        if tokens.spans is None:
            raise ValueError(
                f"{type(self._tokenizer).__name__} does not say which characters a token holds, so the query's tokens "
                "are not found. Use a fast tokenizer."
            )
        return tokens.ids, [end > len(self._between) for _, end in tokens.spans]

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, processing_kwargs: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Tokenize a list.

        Args:
            inputs: N pairs of a query, the same in all, and a document.
            prompt: Text at the front of the prompt.
            processing_kwargs: ``{"text": {"max_length": n}}`` truncates documents to n tokens in this call.
            **kwargs: Ignored.

        Returns:
            Features for :meth:`forward`: token ids.

        Raises:
            ValueError: If an input is not a pair of strings, there are several queries, or a query leaves no room for a
                document.
        """
        for index, pair in enumerate(inputs):
            is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
            if not is_pair or not all(isinstance(text, str) for text in pair):
                raise ValueError(f"Input {index} is {pair!r:.80}: give pairs of a query and a document, two strings.")
        queries = {query for query, _ in inputs}
        if len(queries) != 1:
            problem = f"{len(queries)} queries were given: documents are scored for one query at a time."
            raise ValueError(f"{problem} Use AttentionReranker.predict, which puts the pairs of each query together.")
        asked = [self._asked(text) for text in (*queries, CONTENT_FREE)]
        before, separator = tokenize(self._tokenizer, [(prompt or "") + self._before, SEPARATOR])
        front = [*special_tokens(self._tokenizer)[0], *before.ids]
        asked_length = (processing_kwargs or {}).get("text", {}).get("max_length")
        limits = [self._tokenizer.model_max_length, check_tokens("max_length", asked_length) or NO_LIMIT]
        if self.lm.positions is not None:
            longest = max(len(ids) for ids, _ in asked)
            limits.append(self.lm.positions - len(front) - len(separator.ids) - longest)
            if limits[-1] < 1:
                raise ValueError(
                    f"A query of {len(asked[0][0])} tokens, with what precedes it, and {len(front)} tokens before the "
                    f"documents leave no room for a document in the model's {self.lm.positions} positions: give a "
                    "shorter one, or a shorter template."
                )
        limit = int(min(limits))
        kept = slice(-limit, None) if self._tokenizer.truncation_side == "left" else slice(limit)
        documents = [tokens.ids[kept] for tokens in tokenize(self._tokenizer, [document for _, document in inputs])]
        return {"front": front, "separator": separator.ids, "documents": documents, "asked": asked}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Score a list.

        Args:
            features: Result of :meth:`preprocess`.
            **kwargs: Ignored.

        Returns:
            The features with ``scores`` (N, 1), float32. A document without tokens has 0.
        """
        front, separator, documents, asked = (features[name] for name in ("front", "separator", "documents", "asked"))
        count, rounds = len(documents), []
        for first in sorted({number * count // self.rotations for number in range(self.rotations)}):
            parts = [[*separator, *document] for document in [*documents[first:], *documents[:first]]]
            with torch.inference_mode():
                read = self._read_documents(front, parts, max(len(ids) for ids, _ in asked))
                query, nothing = self._paid(read, asked)
            paid = (query - nothing).sum(dim=0)
            scores = [calibrated(paid[span][len(separator) :]) for span in read.spans]
            rounds.append(torch.stack(scores).roll(first))
        return {**features, "scores": torch.stack(rounds).mean(dim=0).float()[:, None]}

    def _read_documents(self, front: list[int], parts: Sequence[list[int]], asked: int) -> ReadDocuments:
        """Run the model over the documents, block by block, and put their keys and values side by side."""
        positions, spans, start = [torch.arange(len(front))], [], len(front)
        layers: list[list[tuple[Tensor, Tensor]]] = []
        for block in self._blocks(len(front), [len(part) for part in parts], asked):
            tokens = [*front, *(token for place in block for token in parts[place])]
            cache = DynamicCache()
            self.lm.run(Layout.of([[(token, NOT_TEXT) for token in tokens]]), **cache_arguments(self.model, cache))
            # The front is the same in all blocks, and kept once.
            used = slice(len(front) if layers else 0, None)
            layers.append([(keys[:, :, used], values[:, :, used]) for keys, values, *_ in cache])
            positions.append(torch.arange(len(front), len(tokens)))
            for place in block:
                spans.append(slice(start, start + len(parts[place])))
                start += len(parts[place])
        joined = [
            (torch.cat([keys for keys, _ in blocks], dim=2), torch.cat([values for _, values in blocks], dim=2))
            for blocks in zip(*layers, strict=True)
        ]
        return ReadDocuments(joined, torch.cat(positions), spans, len(front) + max(map(len, positions[1:])))

    def _blocks(self, front: int, lengths: Sequence[int], asked: int) -> list[list[int]]:
        """Return the documents that are read together, given their numbers of tokens."""
        if not self.together:
            return [[place] for place in range(len(lengths))]
        available = None if self.lm.positions is None else self.lm.positions - front - asked
        most = min((limit for limit in (self.block_tokens, available) if limit is not None), default=sum(lengths))
        blocks: list[list[int]] = [[]]
        size = 0
        for place, length in enumerate(lengths):
            if blocks[-1] and size + length > most:
                blocks.append([])
                size = 0
            blocks[-1].append(place)
            size += length
        return blocks

    def _paid(self, read: ReadDocuments, asked: Sequence[tuple[list[int], list[bool]]]) -> Tensor:
        """Return the attention of the query, and of that without content, to each token, by head: (2, heads, K)."""
        layout = Layout.of([[(token, NOT_TEXT) for token in ids] for ids, _ in asked])
        length, device = layout.input_ids.shape[1], self.lm.device
        counts = torch.tensor([[*counted, *(length - len(counted)) * [False]] for _, counted in asked], device=device)
        watched = MeanOverQueries(self.layers, counts, len(read.positions))
        positions = (read.start + torch.arange(length, device=device)).expand(len(asked), -1)
        cache = cache_arguments(self.model, read_only_cache(read.layers))
        self.lm.run(layout, DocumentMask(read), watched, position_ids=positions, **cache)
        if self.heads is not None:
            return torch.stack([watched.means[layer][:, head].to(device) for layer, head in self.heads], dim=1)
        return torch.cat([watched.means[layer].to(device) for layer in self.layers], dim=1)


class AttentionReranker(CrossEncoder):
    """A ``CrossEncoder`` whose :class:`AttentionRerankModule` scores all documents of a query together.

    ``rank(query, documents)`` and ``predict(pairs)`` are those of ``CrossEncoder``; ``predict`` groups pairs by query.
    A score is relative to the other documents of its list.
    """

    #: Number of scores of a pair.
    num_labels = 1

    def get_default_activation_fn(self) -> Callable[[Tensor], Tensor]:
        """Return the identity: a score is no logit."""
        return nn.Identity()

    def save_pretrained(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Save the model, with a card that loads it with this class."""
        super().save_pretrained(path, *args, **kwargs)
        card = Path(path) / "README.md"
        if card.is_file():
            imported = "from sentence_transformers import CrossEncoder", "from st_reba import AttentionReranker"
            text = card.read_text("utf-8").replace(*imported).replace("CrossEncoder(", "AttentionReranker(")
            card.write_text(text, "utf-8")

    @torch.inference_mode()
    def predict(  # type: ignore[override]
        self,
        inputs: Sequence[Any],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        activation_fn: Callable[[Tensor], Tensor] | None = None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        pool: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Score pairs, query by query.

        Args:
            inputs: Pairs of a query and a document, or one such pair.
            prompt_name: Name of a saved prompt.
            prompt: Text at the front of each query's prompt.
            activation_fn: Function applied to the scores. None: that of the model, the identity.
            convert_to_numpy: Whether to return an array, (pairs,), and not a list of tensors.
            convert_to_tensor: Whether to return a tensor.
            device: Device on which the model runs. None: its own.
            pool: Not allowed, nor is a list of devices.
            **kwargs: Arguments of the module's ``preprocess``. Others of ``CrossEncoder.predict``, such as
                ``batch_size``, are ignored.

        Raises:
            ValueError: If the model has another module, several processes are asked for, or an input is not a pair of
                strings.
        """
        if not isinstance(self[0], AttentionRerankModule):
            raise ValueError("The model has no AttentionRerankModule: build one that has, with st-reba build --rerank.")
        if pool is not None or isinstance(device, list):
            raise ValueError("AttentionReranker runs in one process: leave pool out, and give one device.")
        is_one = self.is_singular_input(inputs)
        pairs: list[Any] = [inputs] if is_one else list(inputs)
        if device is not None:
            self.to(device)
        self.eval()
        prompt = self._resolve_prompt(prompt, prompt_name)
        places_of: dict[Any, list[int]] = {}
        for place, pair in enumerate(pairs):
            places_of.setdefault(pair[0] if len(pair) else "", []).append(place)
        scores = torch.zeros(len(pairs), device=self.device)
        for places in places_of.values():
            features = self.preprocess([[*pairs[place]] for place in places], prompt=prompt, **kwargs)
            scores[places] = self(features)["scores"][:, 0].to(scores)
        scores = (activation_fn or self.activation_fn or nn.Identity())(scores)
        result: Any = scores
        if not convert_to_tensor:
            result = scores.cpu().numpy() if convert_to_numpy else [*scores]
        return result[0] if is_one else result


def _check_heads(heads: Any, config: Any) -> list[list[int]]:
    """Return pairs of a layer and a head that a model has, as lists."""
    config = config.get_text_config(decoder=True)
    depth, count = config.num_hidden_layers, config.num_attention_heads

    def is_head(pair: Any) -> bool:
        is_pair = isinstance(pair, (list, tuple)) and [*map(type, pair)] == [int, int]
        return is_pair and 0 <= pair[0] < depth and 0 <= pair[1] < count

    has = f"the model has {depth} layers of {count} heads, counted from 0."
    advice = f"give a list of pairs of a layer and a head, such as [[1, 0], [1, 3]], or None; {has}"
    check("heads", heads, isinstance(heads, (list, tuple)) and len(heads) > 0 and all(map(is_head, heads)), advice)
    return [[*pair] for pair in heads]


def middle(config: Any) -> list[int]:
    """Return the middle layers of a model of this configuration, of those without a sliding window.

    A layer with a sliding window, as most of Gemma 3 have, sees the last documents alone.
    """
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    wide = [layer for layer, kind in enumerate(kinds) if kind != "sliding_attention"] or [*range(len(kinds))]
    first = max(0, (len(wide) - MIDDLE) // 2)
    return wide[first : first + MIDDLE]


def calibrated(scores: Tensor) -> Tensor:
    """Return the sum of the scores of a document's tokens, (n,), without abnormally low ones.

    A document of one token has no deviation, and its token counts.
    """
    if len(scores) < 2:
        return scores.sum()
    return scores[scores > scores.mean() - DEVIATIONS * scores.std()].sum()
