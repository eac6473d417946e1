"""ReBA: let early tokens look back from the repetition, through the model's own attention."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from torch.nn.functional import pad

from ...lm import backbone
from ...lm.attention import routes
from ...lm.attention.observers import InChunks, RunningMaximum
from ...lm.attention.weights import split
from ...lm.precision import summing_dtype, weighted_sum
from ...text.chunks import chunk_sizes, repeated_chunks
from ...text.layout import Layout
from ...text.templates import Template
from ..base import CausalModule, PoolOver, Rows
from ..changes import Change
from ..checks import check_layers, check_repetitions, check_rows, resolve_layers
from ..look_back import CopySums, Sums, backward_weights, take
from ..readout import Reading, even_slices


class ReBAModule(CausalModule):
    r"""ReBA-k (retrieval backward attention): the text stands k times, N = kn tokens, and

    .. math:: e_i = \sum_{j=i}^{kn} a_{ij} v_j, \quad i = 1, \dots, n

    where :math:`v_j` is the last hidden state of token j and :math:`a_{ij}` the maximum over layers and heads of the
    symmetrised attention :math:`(A + A^T)/2` (Eqs. 4 to 6, Algorithms 1 to 3 of the paper). ``Pooling("mean")`` then
    gives :math:`\frac{1}{n} \sum_i e_i` and ``Pooling("lasttoken")`` gives :math:`e_n`.

    The attention maps are never stored. As A is lower triangular, :math:`a_{ij}` is half of max :math:`A_{ji}` off the
    diagonal and max :math:`A_{ii}` on it; the maximum runs along with the forward pass.

    With ``chunk_length``, for long texts, the text is read whole, once, and cut into chunks, each of which then stands
    k times in a row of its own, behind what stands before the text (special tokens, prompt). With v from the whole
    text, u from the chunk's own row, and chunk C of token i,

    .. math:: e_i = \sum_{j \in C, j \geq i} a_{ij} v_j + \sum_{j \in \text{copies } 2 .. k \text{ of } C} a_{ij} u_j

    A text of one chunk has the embedding that it has without chunks.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        repetitions: k >= 1, how often the text stands in the input. 1 is backward attention without repetition.
        layers: ``"all"``, or the indices of the layers whose attention counts; negative ones from the top. ``[-1]`` is
            the ablation of the paper's appendix A.1.3.
        rows: ``"all"`` computes every :math:`e_i`, (B, n, D). ``"last"`` computes and hands on :math:`e_n` alone,
            (B, 1, D): the cheap way when last pooling is all that is wanted.
        normalize_weights: Divide each row of weights by its sum. The paper, and so the default, does not. The authors'
            released code sums the rows of a word first and then divides, a pure scale, which is the same for a word of
            one token only.
        chunk_length: Tokens of a chunk; None reads texts in one piece. ``max_seq_length`` is then that of the text
            standing once.
        pool_over: ``"text"``: there are rows for text only.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If a setting is out of range, or the model is not causal, or has no attention.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "repetitions", "layers", "rows", "normalize_weights", "chunk_length"]
    PROMPTS_MAY_DIFFER = False
    REPEATS_TEXT = True
    method = "ReBA"
    equation = (
        r"e_i = \sum_{j=i}^{kn} a_{ij} v_j, \quad "
        r"a_{ij} = \max_{\text{layers, heads}} \tfrac{1}{2}(A_{ij} + A_{ji}), \quad i = 1, \dots, n"
    )
    chunk_equation = (
        r"e_i = \sum_{j \in C(i), j \geq i} a_{ij} v_j + \sum_{j \in \text{copies } 2 \dots k \text{ of } C(i)} "
        r"a_{ij} u_j, \quad a_{ij} = \max_{\text{layers, heads}} \tfrac{1}{2}(A_{ij} + A_{ji}), \quad C(i): "
        r"\text{the chunk of token } i, \ u: \text{the states of the chunk repeated on its own}"
    )
    citation = (
        "Retrieval Backward Attention without Additional Training: "
        "Enhance Embeddings of Large Language Models via Repetition."
    )

    #: Memory that the weights of one part of a batch may take, in bytes; a larger batch is run in parts.
    WEIGHT_BUDGET: ClassVar[int] = 2**30

    def __init__(
        self,
        model_name_or_path: str | Transformer,
        *,
        repetitions: int = 2,
        layers: Literal["all"] | Sequence[int] = "all",
        rows: Rows = "all",
        normalize_weights: bool = False,
        chunk_length: int | None = None,
        pool_over: PoolOver = "text",
        **transformer_kwargs: Any,
    ) -> None:
        check_rows(rows)
        check_repetitions(repetitions, least=1)
        if pool_over != "text":
            raise ValueError(f'pool_over={pool_over!r}: ReBA has rows for text only; use "text".')
        if not isinstance(normalize_weights, bool):
            raise ValueError(f"normalize_weights={normalize_weights!r}: use True or False.")
        checked_layers = check_layers(layers)
        _check_chunk_length(chunk_length)
        super().__init__(
            model_name_or_path,
            template=Template.repeat(repetitions if chunk_length is None else 1),
            pool_over=pool_over,
            unfit_changes=partial(_unfit_for_chunks, chunk_length),
            **transformer_kwargs,
        )
        self.repetitions = repetitions
        self.layers = checked_layers
        self._set_rows(rows)
        self.chunk_length = chunk_length
        self.normalize_weights = normalize_weights
        self._route = routes.attention_route(self.model)
        self._through_function = self._route.through_function
        self._watched = resolve_layers(self.layers, self.model, self._route.layers)
        if not self._through_function:
            warnings.warn(
                f"{type(self.model).__name__} computes its attention in its own code, so its attention maps are "
                "stored and read in small batches. The numbers are the same; it takes more memory and time.",
                stacklevel=2,
            )

    def check(self) -> None:
        """Refuse, besides, chunks whose copies do not fit."""
        super().check()
        self._check_chunks_fit()

    @property
    def copies(self) -> int:
        """How often the text, or each of its chunks, stands in a row."""
        return self.repetitions

    @property
    def unfit_poolings(self) -> Mapping[str, str]:
        """The first row alone, which is no embedding of the paper's."""
        return {
            "cls": "it reads e_1, what looks back at the first token alone; the embedding is the mean of e_1 to e_n, "
            'or e_n. Use Pooling("mean") or Pooling("lasttoken").'
        }

    @property
    def own_equation(self) -> str:
        return self.equation if self.chunk_length is None else self.chunk_equation

    @property
    def cost(self) -> str:
        if self.chunk_length is None or self.copies == 1:
            return super().cost
        return (
            f"One pass over the text and one over {self.copies} copies of each of its chunks of {self.chunk_length} "
            f"tokens: up to about {self.copies + 1} times the classical embedding, less the longer the text is. The "
            "weights take memory that grows with the text's length, not with its square."
        )

    def max_tokens(self, prompt: str | None = None, processing_kwargs: Any = None) -> int | None:
        self._check_chunks_fit(prompt)
        return super().max_tokens(prompt, processing_kwargs)

    def _check_chunks_fit(self, prompt: str | None = None) -> None:
        available = backbone.positions(self.model)
        if self.chunk_length is None or available is None:
            return
        before = self._builder().overhead(prompt)
        if before + self.copies * self.chunk_length > available:
            fitting = (available - before) // self.copies
            advice = f"use at most {fitting}" if fitting > 0 else "use fewer repetitions, or a shorter prompt"
            raise ValueError(
                f"chunk_length={self.chunk_length}: {self.copies} copies of a chunk and {before} tokens of prompt and "
                f"special tokens do not fit into the model's {available} positions; {advice}."
            )

    def _read(self, layout: Layout, **kwargs: Any) -> Reading:
        if self.chunk_length is None:
            sums, totals, dtype = self._sums(layout, range(self.copies), **kwargs)
        else:
            sums, totals, dtype = self._chunk_sums(layout, **kwargs)
        if self.normalize_weights:
            sums = sums / totals.clamp(min=torch.finfo(sums.dtype).tiny)
        rows, mask = self._rows(layout)
        return Reading(sums.to(dtype), mask, layout.input_ids.gather(1, layout.text_start + rows))

    def varied(self, repetitions: int, rows: Rows) -> ReBAModule:
        """The same module on the same weights, with another number of copies and other rows, and without chunks."""
        twin = copy.copy(self)
        twin._template = Template.repeat(repetitions)
        twin.repetitions, twin.rows, twin.chunk_length = repetitions, rows, None
        return twin

    def _part_size(self, layout: Layout) -> int:
        """Besides, as many texts as the memory budget of the weights allows, at least one."""
        if self.chunk_length is None:
            return self._fitting(layout)
        longest = layout.longest_text
        # The chunks' maxima and weights, and two steps between them.
        return self._fitting(layout, 1 if self.rows == "last" else 4 * longest * min(longest, self.chunk_length))

    def _fitting(self, layout: Layout, weights: int | None = None) -> int:
        """How many of these rows may run at a time, by the weights of each; None: those of the rows read whole."""
        size = super()._part_size(layout)
        if not self._through_function:
            return min(size, routes.micro_batch(self.model, layout.input_ids.shape[1]))
        if weights is None:
            longest = layout.longest_text
            # The maxima of all copies, and of one copy at a time the maxima, the weights and two steps between them.
            weights = (1 if self.rows == "last" else longest) * (layout.input_ids.shape[1] + 4 * longest)
        return min(size, max(1, self.WEIGHT_BUDGET // (4 * weights)))

    def copy_sums(self, layout: Layout, **kwargs: Any) -> Iterator[CopySums]:
        """One forward pass, read copy by copy.

        As attention is causal, what the first copies give is what a pass over these copies alone would.

        Args:
            layout: B texts.
            **kwargs: For the backbone's forward.

        Yields:
            For each copy, what the text gives up to its end; the last is ReBA-k. A text without tokens gives zeros.
        """
        rows, mask = self._rows(layout)
        ids = layout.input_ids.gather(1, layout.text_start + rows)
        for values, so_far in self._look_back(layout, range(self.copies), **kwargs):
            states = take(values, rows) if self.rows == "last" else values
            yield CopySums(states, so_far.sums, so_far.totals, mask, ids)

    def _sums(self, layout: Layout, copies: range, **kwargs: Any) -> Sums:
        """What the rows' tokens look back to in these copies of the layout, (B, rows, ...)."""
        return deque(self._look_back(layout, copies, **kwargs), maxlen=1).pop()[1]

    def _chunk_sums(self, layout: Layout, **kwargs: Any) -> Sums:
        """(B, rows, ...): ReBA-k in chunks, of texts that stand once."""
        assert self.chunk_length is not None
        sizes = chunk_sizes(layout, self.chunk_length)
        count = sizes.shape[1]
        last = self.rows == "last"
        chunks = repeated_chunks(layout, self.chunk_length, self.copies, last_only=last)
        place = chunks.text if last else chunks.text * count + chunks.number
        if count == 1:
            # The first copy in a row of its own is then the whole text.
            sums, totals, dtype = self._sums_in_parts(chunks.layout, range(self.copies), **kwargs)
            order = place.argsort()
            return Sums(sums[order], totals[order], dtype)
        sums, totals, dtype = self._once_sums(layout, sizes, **kwargs)
        if self.copies > 1:
            again = self._sums_in_parts(chunks.layout, range(1, self.copies), **kwargs)
            sums, totals = sums.index_add(0, place, again.sums), totals.index_add(0, place, again.totals)
        if last:
            return Sums(sums, totals, dtype)
        longest = layout.longest_text
        sums, totals = (values.unflatten(0, (-1, count)).flatten(1, 2)[:, :longest] for values in (sums, totals))
        return Sums(sums, totals, dtype)

    def _once_sums(self, layout: Layout, sizes: Tensor, **kwargs: Any) -> Sums:
        """What tokens look back to within their chunks of the whole text.

        Returns:
            (B * chunks, chunk_length, ...); for ``rows="last"`` (B, 1, ...), where only the last token itself is left.
        """
        if self.rows == "last":
            return self._sums(layout, range(1), **kwargs)
        assert self.chunk_length is not None
        start, length, (texts, count) = layout.text_start, self.chunk_length, sizes.shape
        maximum = RunningMaximum(slice(0, length), slice(0, length), self._watched)
        chunks = InChunks(maximum, start, length, count)
        states = self.run(layout, observe=chunks, **kwargs)
        values = split(states, 1, start, length, count).flatten(0, 1)
        offset = torch.arange(length, device=states.device).expand(texts * count, -1)
        weights = backward_weights(maximum.result().to(states.device), offset, offset, offset < sizes.view(-1, 1))
        return Sums(weighted_sum(weights, values), weights.sum(dim=-1, keepdim=True), states.dtype)

    def _sums_in_parts(self, chunks: Layout, copies: range, **kwargs: Any) -> Sums:
        """What the rows' tokens of R chunks look back to in these copies, (R, rows, ...), a few chunks at a time."""
        rows = self._rows(chunks)[0].shape[1]
        parts = even_slices(len(chunks.input_ids), self._fitting(chunks))
        found = [self._sums(chunks.part(part), copies, **kwargs) for part in parts]
        sums, totals = (
            torch.cat([pad(values, (0, 0, 0, rows - values.shape[1])) for values in several])
            for several in zip(*((part.sums, part.totals) for part in found), strict=True)
        )
        return Sums(sums, totals, found[0].dtype)

    def _rows(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Which tokens of each text have a row, and which of these are real, each (B, rows)."""
        length = layout.text_length[:, None]
        if self.rows == "last":
            rows = (length - 1).clamp(min=0)
        else:
            rows = torch.arange(layout.longest_text, device=length.device).expand(len(length), -1)
        return rows, rows < length

    def _look_back(self, layout: Layout, copies: range, **kwargs: Any) -> Iterator[tuple[Tensor, Sums]]:
        """One forward pass: for each of these copies its states, (B, n, D), and the sums up to its end."""
        start, length = layout.text_start, layout.text_length[:, None]
        offset = torch.arange(layout.longest_text, device=length.device)
        keys = start + self._rows(layout)[0]
        host, host_keys = layout.on_host, start + self._rows(layout.on_host)[0]
        # Queries before the first copy that counts are not asked for.
        first = max(int(host_keys.min()), start + copies.start * int(host.text_length.min()))
        maximum = self._maximum(keys, int(host_keys.min()), slice(first, layout.input_ids.shape[1]))
        states = self.run(layout, observe=maximum, **kwargs)
        log_weights = maximum.result().to(states.device)
        sums = torch.zeros(*keys.shape, states.shape[-1], dtype=summing_dtype(states.dtype), device=states.device)
        totals = sums.new_zeros(*keys.shape, 1)
        for number in copies:
            position = (start + number * length + offset).clamp(max=states.shape[1] - 1)
            values = take(states, position)
            column = (position - first).clamp(min=0)[:, None].expand(-1, keys.shape[1], -1)
            weights = backward_weights(log_weights.gather(2, column), keys, position, offset < length)
            sums = sums + weighted_sum(weights, values)
            totals = totals + weights.sum(dim=-1, keepdim=True)
            yield values, Sums(sums, totals, states.dtype)

    def _maximum(self, keys: Tensor, first: int, queries: slice) -> RunningMaximum:
        """The running maximum of the log weights of these queries on ``keys``, (B, rows), of which ``first`` is one."""
        watched = keys[:, 0] if self.rows == "last" else slice(first, first + keys.shape[1])
        return RunningMaximum(watched, queries, self._watched)


def _check_chunk_length(chunk_length: int | None) -> None:
    if chunk_length is not None and (type(chunk_length) is not int or chunk_length < 1):
        raise ValueError(
            f"chunk_length={chunk_length!r}: give the tokens of a chunk, 1 or more (128 is a good start), or None to "
            "read texts in one piece."
        )


def _unfit_for_chunks(chunk_length: int | None, change: Change) -> str | None:
    if chunk_length is not None and change.companion is not None:
        return (
            f"chunk_length={chunk_length} with {change}: it is about the last token of a whole text, and each chunk "
            "stands in a row of its own. Leave one of the two out."
        )
    if chunk_length is None or not change.looks_ahead:
        return None
    return (
        f"chunk_length={chunk_length} with {change}: where tokens see what follows, a chunk on its own is not what it "
        "is in its text. Leave one of the two out."
    )
