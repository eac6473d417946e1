"""In-context reranking: documents are ordered by the attention that a query's tokens pay to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from sentence_transformers import CrossEncoder
from torch import Tensor, nn

from ..lm import backbone
from ..lm.attention import setup
from ..lm.attention.changes import BehindAll
from ..lm.attention.observers import MeanOverQueries
from ..lm.prefixes import Prefixes
from ..lm.run import PassChange, run
from ..settings import Setting, flag, layers_or_all, optional, tokens, whole
from ..text.layout import NOT_TEXT, Layout
from ..text.templates import around_slots
from ..text.tokens import special_tokens, tokenized
from .causal_module import CausalModule
from .checkpoints import SafeTransformer

QUERY, DOCUMENTS = "{query}", "{documents}"

#: The prompt of the paper, in words of our own.
TEMPLATE = (
    "Here are some paragraphs:{documents}\n\nFind what is relevant to the following query in the paragraphs above."
    "\n\nQuery: {query}"
)
#: What stands before each document.
SEPARATOR = "\n\n"
#: The query without content, whose attention is taken off.
CONTENT_FREE = "N/A"
#: A token whose score lies more than so many standard deviations below the mean of its document does not count.
DEVIATIONS = 2.0
#: Layers round the middle, where the attention to relevant documents is highest.
MIDDLE = 4

TOGETHER = flag("together")
ROTATIONS = whole("rotations", 1, 64, "give how often the list is read, each time from another document on, 1 to 64.")
BLOCK_TOKENS = tokens("block_tokens")
LAYERS: Setting[Any] = layers_or_all("layers")
HEADS: Setting[Any] = optional(
    Setting(
        "heads",
        lambda value: (
            isinstance(value, (list, tuple))
            and len(value) > 0
            and all(isinstance(each, (list, tuple)) and [*map(type, each)] == [int, int] for each in value)
        ),
        "give a list of pairs of a layer and a head, both counted from 0, such as [[12, 3], [14, 0]], or None.",
    )
)
#: Settings of :class:`CausalModule` that are about states, which are not read here.
_ABOUT_STATES = (
    "pool_over", "rows", "preset", "bidirectional_layers", "output_layer", "final_norm", "normalize_text",
    "tokenization", "deterministic", "prefix_caching", "chat",
)  # fmt: skip


@dataclass(frozen=True)
class KeptDocuments:
    """Documents as a model has read them, side by side: several queries may be read behind them.

    Attributes:
        prefixes: One row, (1, G, K, d) a layer: what stands before all documents, and then each document.
        positions: (K,), where each token was read.
        spans: Of each document, where its tokens lie among the K.
        start: The first position behind all of them.
    """

    prefixes: Prefixes
    positions: Tensor
    spans: Sequence[slice]
    start: int


class AttentionRerankModule(CausalModule):
    r"""The attention that a query's tokens pay to each document of a list, less that of a query without content.

    .. math:: s_i = \sum_{t \in D_i} (a_t(q) - a_t(\text{N/A})), \quad
        a_t(q) = \sum_{l, h} \frac{1}{|q|} \sum_{j \in q} A^{(l, h)}_{jt}

    over the chosen layers l and heads h, where all documents stand in one prompt before the query. Of each document
    the tokens that score less than their mean less two standard deviations do not count. Nothing is generated, and no
    map is stored. The documents' keys and values are computed once; the query and "N/A" are read behind them.

    A score says how a document stands among those that it was given with. So the documents of a query are scored
    together: :class:`AttentionReranker` does that, and a plain ``CrossEncoder``, which cuts lists in batches, refuses
    this module.

    Args:
        model_name_or_path: A decoder-only language model's path or Hub id, or a loaded ``Transformer`` to share.
        template: Text with one ``{documents}`` and, behind it, one ``{query}``. Attention is read from the query's
            first token on to the template's end.
        layers: Whose attention counts: ``"middle"``, four round the middle of those without a sliding window;
            ``"all"``; or a list of indices, negative ones from the top. The layers above the last of them are not run,
            and not saved.
        heads: Pairs of a layer and a head, in place of ``layers``: those alone count.
        together: True: the documents are read one after the other in the order given, and see those before them.
            False: each is read alone, at the same positions behind the template's beginning, so that their order
            changes nothing but rounding. They are then ranked worse.
        rotations: With ``together``, how often the list is read, each time from another document on: the scores are
            means. As many as there are documents give each of them every place once; which documents are neighbours
            still depends on the order, but for its rotations.
        block_tokens: With ``together``, how many tokens are read together. A longer list is cut into blocks that stand
            side by side behind the template's beginning, and the query is read behind all of them: one softmax, so
            that the scores of all blocks compare. None: as many as the model has positions for.
        **transformer_kwargs: As for ST's ``Transformer``; ``max_seq_length`` counts tokens of one document, and longer
            ones are cut.

    Raises:
        ValueError: If a setting is out of range, or the model's attention cannot be watched behind a cache.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

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
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        template: str = TEMPLATE,
        layers: Literal["middle", "all"] | Sequence[int] = "middle",
        heads: Sequence[Sequence[int]] | None = None,
        together: bool = True,
        rotations: int = 1,
        block_tokens: int | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        self._before, self._between, self._end = around_slots(template, DOCUMENTS, QUERY)
        if layers != "middle":
            LAYERS.check(layers)
        self.layers: Literal["middle", "all"] | list[int] = layers if isinstance(layers, str) else list(layers)
        self.heads = None if HEADS.check(heads) is None else [list(pair) for pair in heads or ()]
        self.together = TOGETHER.check(together)
        self.rotations = ROTATIONS.check(rotations)
        self.block_tokens = BLOCK_TOKENS.check(block_tokens)
        if not together and (rotations > 1 or block_tokens is not None):
            raise ValueError(
                f"rotations={rotations}, block_tokens={block_tokens}: documents that are read alone have no order and "
                "no blocks. Set together=True, or leave both out."
            )
        if unfit := [name for name in _ABOUT_STATES if name in transformer_kwargs]:
            raise ValueError(f"{unfit[0]}: {type(self).__name__} reads attention, and no states. Leave it out.")
        super().__init__(model_name_or_path, **transformer_kwargs)
        self.template = template
        if not setup.make_cacheable(self.model):
            raise ValueError(
                f"{type(self.model).__name__}: its attention cannot be watched behind documents that it has read, "
                "because it does not call transformers' attention interface, or has another memory than keys and "
                "values. Use another architecture, such as Llama, Qwen, Mistral or Gemma."
            )

    def _shorten(self, output_layer: int | None, usual: float | None) -> None:
        """Besides, the layers are found, and the model ends behind the last of them."""
        depth = self.whole_depth
        count = self.model.config.get_text_config(decoder=True).num_attention_heads
        if self.heads is not None:
            if wrong := [pair for pair in self.heads if not (0 <= pair[0] < depth and 0 <= pair[1] < count)]:
                raise ValueError(
                    f"heads={self.heads}: the model has {depth} layers of {count} heads, counted from 0, so "
                    f"{wrong[0]} is out of range."
                )
            found = {layer for layer, _ in self.heads}
        elif self.layers == "middle":
            found = {*middle(self.model.config)}
        else:
            found = {*setup.resolve_layers(self.layers, self.model, range(depth))}
        # As numbers, which mean the same in what is saved, the shorter model.
        self.layers = self._watched = sorted(found)
        super()._shorten(self._watched[-1] + 1, None)

    def on_model_ready(self, model: Any) -> None:
        """Called by ST when the pipeline is complete.

        Raises:
            ValueError: If it is a plain ``CrossEncoder``, whose batches would tear lists apart.
        """
        if isinstance(model, CrossEncoder) and not isinstance(model, AttentionReranker):
            raise ValueError(
                "AttentionRerankModule scores all documents of a query together, and a CrossEncoder scores pairs in "
                "batches. Load it with st_reba.AttentionReranker(path), which has the same rank and predict."
            )
        super().on_model_ready(model)

    def _room(self, prompt: str | None = None) -> int | None:
        """Tokens that a document may have beside the template and a query of one token; None: no limit.

        Raises:
            ValueError: If none.
        """
        available = self._positions()
        if available is None:
            return None
        around = len(self._front(prompt or "")) + len(self._separator()) + len(self._asked("a")[0])
        if around >= available:
            raise ValueError(
                f"The template {around} tokens long leaves no room for a document in the model's {available} "
                "positions: give a shorter one."
            )
        return available - around

    def _front(self, prompt: str) -> list[int]:
        """The tokens before all documents."""
        (found,) = tokenized(self._tokenizer, [prompt + self._before])
        return [*special_tokens(self._tokenizer)[0], *found.ids]

    def _separator(self) -> list[int]:
        return tokenized(self._tokenizer, [SEPARATOR])[0].ids

    def _asked(self, query: str) -> tuple[list[int], list[bool]]:
        """The tokens behind all documents, and which of them belong to the query or stand behind it."""
        (found,) = tokenized(self._tokenizer, [self._between + query + self._end])
        if found.spans is None:
            raise ValueError(
                f"{type(self._tokenizer).__name__} does not say which characters a token holds, so the query's tokens "
                "are not found. Use a fast tokenizer."
            )
        return found.ids, [end > len(self._between) for _, end in found.spans]

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, processing_kwargs: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Tokenise a list.

        Args:
            inputs: N pairs of a query, the same in all, and a document.
            prompt: Literal text at the front of the prompt.
            processing_kwargs: ``{"text": {"max_length": n}}`` cuts documents after n tokens for this call.
            **kwargs: What ST passes to every module.

        Returns:
            What :meth:`forward` is given: token ids.

        Raises:
            ValueError: If an input is no pair of strings, or there are several queries, or a query leaves no room for a
                document.
        """
        for index, given in enumerate(inputs):
            is_pair = isinstance(given, (list, tuple)) and len(given) == 2
            if not is_pair or not all(isinstance(each, str) for each in given):
                raise ValueError(f"Input {index} is {given!r:.80}: give pairs of a query and a document, two strings.")
        if len({query for query, _ in inputs}) != 1:
            raise ValueError(
                f"{len({query for query, _ in inputs})} queries were given: documents are scored for one query at a "
                "time. Use AttentionReranker.predict, which puts the pairs of each query together."
            )
        asked = [self._asked(text) for text in (inputs[0][0], CONTENT_FREE)]
        front, separator = self._front(prompt or ""), self._separator()
        limit, available = self._limit(self._asked_length(processing_kwargs)), self._positions()
        if available is not None:
            room = available - len(front) - len(separator) - max(len(ids) for ids, _ in asked)
            if room < 1:
                raise ValueError(
                    f"A query of {len(asked[0][0])} tokens, with what stands before it, and {len(front)} tokens before "
                    f"the documents leave no room for a document in the model's {available} positions: give a shorter "
                    "query."
                )
            limit = min(room, limit) if limit is not None else room
        found = tokenized(self._tokenizer, [document for _, document in inputs])
        # Of a long document the tokenizer's side is cut off.
        kept = slice(limit)
        if limit is not None and self._tokenizer.truncation_side == "left":
            kept = slice(-limit, None)
        documents = [each.ids[kept] for each in found]
        return {"front": front, "separator": separator, "documents": documents, "asked": asked}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Score a list.

        Args:
            features: What :meth:`preprocess` returned.
            **kwargs: What ST passes to every module.

        Returns:
            The features with ``scores`` (N, 1), float32. A document without tokens has 0.
        """
        count = len(features["documents"])
        found: list[Tensor] = []
        for first in sorted({round * count // self.rotations for round in range(self.rotations)}):
            order = [*range(first, count), *range(first)]
            weights = self.token_weights(features, order)
            scores = torch.stack([calibrated(each.sum(dim=0)) for each in weights])
            found.append(scores.new_zeros(count).index_put((torch.tensor(order, device=scores.device),), scores))
        return {**features, "scores": torch.stack(found).mean(dim=0).float()[:, None]}

    def token_weights(self, features: Mapping[str, Any], order: Sequence[int] | None = None) -> list[Tensor]:
        """What each head pays to each token for the query, less what it pays for the query without content.

        Args:
            features: What :meth:`preprocess` returned.
            order: In which the documents are read. None: as they are given.

        Returns:
            For each document in that order (heads, tokens): the heads of the chosen layers, layer by layer, or the
            chosen heads in the order of ``heads``.
        """
        documents = [features["documents"][place] for place in order or range(len(features["documents"]))]
        with torch.inference_mode():
            kept = self._read_documents(features["front"], features["separator"], documents, features["asked"])
            query, nothing = self._paid(kept, features["asked"])
        return [(query - nothing)[:, span] for span in kept.spans]

    def _read_documents(
        self, front: list[int], separator: list[int], documents: Sequence[list[int]], asked: Sequence[Any]
    ) -> KeptDocuments:
        """Run the model over the documents, block by block, and put their keys and values side by side."""
        behind = [[*separator, *document] for document in documents]
        blocks = self._blocks(len(front), [len(each) for each in behind], max(len(ids) for ids, _ in asked))
        rows = [[*front, *(token for place in block for token in behind[place])] for block in blocks]
        found: list[Sequence[tuple[Tensor, Tensor]]] = [()] * len(rows)
        # Those of nearly one length together, so that little is padded.
        by_length = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        size = max(1, self.CPU_TOKENS * torch.get_num_threads() // len(rows[by_length[0]]))
        for first in range(0, len(rows), size):
            part = by_length[first : first + size]
            read = Prefixes.of(self.model, tuple(tuple(rows[row]) for row in part)).layers
            for place, row in enumerate(part):
                # What all rows begin with is kept once.
                used = slice(0 if row == 0 else len(front), len(rows[row]))
                found[row] = [(keys[place, :, used], values[place, :, used]) for keys, values in read]
        layers = []
        for parts in zip(*found, strict=True):
            keys, values = (torch.cat(each, dim=1)[None] for each in zip(*parts, strict=True))
            layers.append((keys, values))
        positions = [torch.arange(len(front)), *(torch.arange(len(front), len(row)) for row in rows)]
        spans, reached = [], len(front)
        for block in blocks:
            for place in block:
                spans.append(slice(reached + len(separator), reached + len(behind[place])))
                reached += len(behind[place])
        start = max(map(len, rows))
        return KeptDocuments(Prefixes(torch.tensor([reached]), layers), torch.cat(positions), spans, start)

    def _blocks(self, front: int, lengths: Sequence[int], asked: int) -> list[list[int]]:
        """Which documents are read together, by their numbers of tokens."""
        if not self.together:
            return [[place] for place in range(len(lengths))]
        available = self._positions()
        limits = [self.block_tokens, None if available is None else available - front - asked]
        most = min((limit for limit in limits if limit is not None), default=sum(lengths))
        blocks: list[list[int]] = [[]]
        size = 0
        for place, length in enumerate(lengths):
            if blocks[-1] and size + length > most:
                blocks.append([])
                size = 0
            blocks[-1].append(place)
            size += length
        return blocks

    def _paid(self, kept: KeptDocuments, asked: Sequence[tuple[list[int], list[bool]]]) -> Tensor:
        """(2, heads, K): what the query, and the one without content, pay to each token, by head."""
        device = backbone.device(self.model)
        longest = max(len(ids) for ids, _ in asked)
        ids = torch.tensor([[*ids, *(longest - len(ids)) * [0]] for ids, _ in asked])
        counts = torch.tensor([[*own, *(longest - len(own)) * [False]] for _, own in asked])
        mask = torch.tensor([[place < len(own) for place in range(longest)] for _, own in asked])
        watched = MeanOverQueries(counts.to(device), len(kept.positions), self._watched)
        cache = kept.prefixes.before(torch.zeros(len(ids), dtype=torch.long)).cache
        given = {
            "input_ids": ids.to(device),
            "position_ids": (kept.start + torch.arange(longest, device=device)).expand(len(ids), -1),
            **backbone.keeping(self.model, cache),
        }
        run(
            self.model,
            Layout(ids, mask, torch.full_like(ids, NOT_TEXT)),
            changes=[PassChange(masking=BehindAll(kept.positions, kept.start, longest))],
            observe=watched,
            inputs=lambda: given,
            reader=type(self).__name__,
        )
        if self.heads is not None:
            return torch.stack([watched.means[layer][:, head].to(device) for layer, head in self.heads], dim=1)
        return torch.cat([watched.means[layer].to(device) for layer in sorted(watched.means)], dim=1)


class AttentionReranker(CrossEncoder):
    """A ``CrossEncoder`` whose :class:`AttentionRerankModule` scores all documents of a query together.

    ``rank(query, documents)`` and ``predict(pairs)`` are those of ``CrossEncoder``; ``predict`` puts the pairs of each
    query together, in their order. A score says how a document stands among those of its list.
    """

    @property
    def num_labels(self) -> int:
        """One score a pair."""
        return 1

    def save_pretrained(self, path: str, *args: Any, **kwargs: Any) -> None:
        """As ``CrossEncoder`` does it; the card's lines load the model with this class, as a plain one refuses it."""
        super().save_pretrained(path, *args, **kwargs)
        card = Path(path) / "README.md"
        if card.is_file():
            told = card.read_text("utf-8").replace("CrossEncoder(", "AttentionReranker(")
            told = told.replace(
                "from sentence_transformers import CrossEncoder", "from st_reba import AttentionReranker"
            )
            card.write_text(told, "utf-8")

    @torch.inference_mode()
    def predict(
        self,
        inputs: Sequence[Any],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Callable[[Tensor], Tensor] | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        pool: Any = None,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Score pairs, query by query.

        Args:
            inputs: Pairs of a query and a document, or one such pair.
            prompt_name: Of a saved prompt.
            prompt: Literal text at the front of each query's prompt.
            batch_size: Without effect: a batch is the list of a query.
            show_progress_bar: Without effect.
            activation_fn: What is done to the scores. None: the model's own, the identity.
            apply_softmax: Without effect, since a pair has one score.
            convert_to_numpy: Whether an array is returned, (pairs,); else a list of tensors.
            convert_to_tensor: Whether a tensor is returned.
            device: Where the model is to run. None: where it is.
            pool: Refused, and so is a list of devices.
            chunk_size: Without effect.
            **kwargs: For the module's ``preprocess``.

        Raises:
            ValueError: If several processes are asked for, or an input is no pair of strings.
        """
        if pool is not None or isinstance(device, list):
            raise ValueError("AttentionReranker runs in one process: leave pool out, and give one device.")
        is_one = self.is_singular_input(inputs)
        pairs: list[Any] = [inputs] if is_one else list(inputs)
        if device is not None:
            self.to(device)
        self.eval()
        lists: dict[Any, list[int]] = {}
        for place, pair in enumerate(pairs):
            lists.setdefault(pair[0] if len(pair) else "", []).append(place)
        scores = torch.zeros(len(pairs), device=self.device)
        for places in lists.values():
            features = self.preprocess(
                [[*pairs[place]] for place in places], prompt=self._resolve_prompt(prompt, prompt_name), **kwargs
            )
            scores[places] = self(features)["scores"][:, 0].to(scores)
        scores = (activation_fn or self.activation_fn or nn.Identity())(scores)
        found: Any = scores if convert_to_tensor else scores.cpu().numpy() if convert_to_numpy else [*scores]
        return found[0] if is_one else found


def attention_reranker(module: AttentionRerankModule, **kwargs: Any) -> AttentionReranker:
    """An :class:`AttentionReranker` of a module.

    Args:
        module: What reads the documents and the query.
        **kwargs: For ``CrossEncoder``, such as ``device``.
    """
    return AttentionReranker(modules=[module], activation_fn=nn.Identity(), **kwargs)


def middle(config: Any) -> list[int]:
    """The layers round the middle of a model of this configuration, of those that see a whole prompt.

    A layer with a sliding window, as most of Gemma 3 are, sees the last documents alone.
    """
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    wide = [layer for layer, kind in enumerate(kinds) if kind != "sliding_attention"] or [*range(len(kinds))]
    first = max(0, (len(wide) - MIDDLE) // 2)
    return wide[first : first + MIDDLE]


def calibrated(scores: Tensor) -> Tensor:
    """The sum over a document's tokens, (n,), but for those that score abnormally low.

    A document of one token has no deviation, and none is dropped.
    """
    if len(scores) < 2:
        return scores.sum()
    return scores[scores > scores.mean() - DEVIATIONS * scores.std()].sum()
