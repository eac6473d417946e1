"""ReBA: let early tokens look back from the repetition, through the model's own attention."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..lm import backbone
from ..lm.attention import setup
from ..lm.attention.observers import RunningMaximum
from ..lm.backbone import weighted_sum
from ..settings import Setting, choice, flag, layers_or_all
from ..text.layout import Layout
from ..text.templates import Template
from .causal_module import CausalModule, PoolOver, Rows, repetitions_from
from .token_vectors import TokenVectors

REPETITIONS = repetitions_from(1)
LAYERS = layers_or_all("layers")
NORMALIZE_WEIGHTS = flag("normalize_weights")
WEIGHTS = r"a_{ij} = \max_{\text{layers, heads}} \tfrac{1}{2}(A_{ij} + A_{ji})"
TEXT_ONLY: Setting[PoolOver] = choice("pool_over", "text", says='ReBA has rows for text only; use "text".')


class ReBAModule(CausalModule):
    r"""ReBA-k (retrieval backward attention): the text stands k times, N = kn tokens, and

    .. math:: e_i = \sum_{j=i}^{kn} a_{ij} v_j, \quad i = 1, \dots, n

    where :math:`v_j` is the last hidden state of token j and :math:`a_{ij}` the maximum over layers and heads of the
    symmetrised attention :math:`(A + A^T)/2` (Eqs. 4 to 6, Algorithms 1 to 3 of the paper). ``Pooling("mean")`` then
    gives :math:`\frac{1}{n} \sum_i e_i` and ``Pooling("lasttoken")`` gives :math:`e_n`.

    The attention maps are never stored. As A is lower triangular, :math:`a_{ij}` is half of max :math:`A_{ji}` off the
    diagonal and max :math:`A_{ii}` on it; the maximum runs along with the forward pass.

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
        pool_over: ``"text"``: there are rows for text only.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If a setting is out of range, or the model is not causal, has no attention, or has attention of its
            own (BLOOM, Falcon, MPT, GPT-Neo).
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "repetitions", "layers", "rows", "normalize_weights"]
    repeats_text = True
    method = "ReBA"
    equation = r"e_i = \sum_{j=i}^{kn} a_{ij} v_j, \quad " + WEIGHTS + r", \quad i = 1, \dots, n"
    citation = (
        "Retrieval Backward Attention without Additional Training: "
        "Enhance Embeddings of Large Language Models via Repetition."
    )

    unfit_poolings = {
        "cls": "it reads e_1, what looks back at the first token alone; the embedding is the mean of e_1 to e_n, or "
        'e_n. Use Pooling("mean") or Pooling("lasttoken").'
    }

    #: Memory that the weights of one part of a batch may take, in bytes; a larger batch is run in parts.
    WEIGHT_BUDGET: ClassVar[int] = 2**30

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        repetitions: int = 2,
        layers: Literal["all"] | Sequence[int] = "all",
        rows: Rows = "all",
        normalize_weights: bool = False,
        pool_over: PoolOver = "text",
        **transformer_kwargs: Any,
    ) -> None:
        self.repetitions = REPETITIONS.check(repetitions)
        LAYERS.check(layers)
        self.layers: Literal["all"] | list[int] = "all" if isinstance(layers, str) else list(layers)
        self.normalize_weights = NORMALIZE_WEIGHTS.check(normalize_weights)
        super().__init__(
            model_name_or_path,
            template=Template.repeat(repetitions),
            pool_over=TEXT_ONLY.check(pool_over),
            rows=rows,
            **transformer_kwargs,
        )
        attending = setup.watch_attention(self.model)
        self._watched = setup.resolve_layers(self.layers, self.model, attending)

    @property
    def reads_behind_prefixes(self) -> bool:
        """Not on a GPU, where no fused kernel gives the sums of a softmax under the mask that a prefix needs."""
        return super().reads_behind_prefixes and backbone.device(self.model).type == "cpu"

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        weights, states = self.look_back(layout, **kwargs)
        # With the sum of the weights behind.
        sums = weighted_sum(weights, pad(states, (0, 1), value=1))
        embeddings, totals = sums[..., :-1], sums[..., -1:]
        if self.normalize_weights:
            embeddings = embeddings / totals.clamp(min=torch.finfo(totals.dtype).tiny)
        rows, mask = self._rows(layout)
        ids = layout.input_ids.gather(1, layout.text_start + rows)
        mask, ids = (part.to(sums.device, non_blocking=True) for part in (mask, ids))
        return TokenVectors(embeddings.to(states.dtype), mask, ids)

    def look_back(self, layout: Layout, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """One forward pass: the weights with which tokens look back from all that follows, and the states that follow.

        Args:
            layout: B texts.
            **kwargs: For the backbone's forward.

        Returns:
            The weights a_ij (B, rows, M), which are 0 where j < i or j is no token of a copy; and the states v_j
            (B, M, D), from the text's first token on.
        """
        start, end = layout.text_start, layout.input_ids.shape[1]
        key = (start + self._rows(layout)[0]).to(backbone.device(self.model), non_blocking=True)
        watched = key[:, 0] if self.rows == "last" else slice(start, start + key.shape[1])
        maximum = RunningMaximum(watched, slice(start, end), self._watched)
        states = self.run(layout, observe=maximum, **kwargs)[:, start:]
        counts = (layout.copy_index[:, None, start:] >= 0).to(states.device, non_blocking=True)
        query = torch.arange(start, end, device=states.device)
        return _weights(maximum, key.to(states.device)[..., None], query, counts), states

    def _part_size(self, layout: Layout) -> int:
        size, queries = super()._part_size(layout), layout.input_ids.shape[1]
        rows = 1 if self.rows == "last" else layout.longest_text
        # The maxima, the weights and two steps between them, in float32.
        return min(size, max(1, self.WEIGHT_BUDGET // (16 * rows * queries)))

    def _rows(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Which tokens of each text have a row, and which of these are real, each (B, rows)."""
        length = layout.text_lengths[:, None]
        every, last = torch.arange(layout.longest_text).expand(len(length), -1), (length - 1).clamp(min=0)
        rows = last if self.rows == "last" else every
        return rows, rows < length


def _weights(maximum: RunningMaximum, key: Tensor, query: Tensor, counts: Tensor) -> Tensor:
    """a_ij (..., rows, queries) from the maximum of log A_ji over layers and heads; 0 where j < i.

    Symmetrising a lower triangular map halves what is off the diagonal and leaves the diagonal as it is; so does
    symmetrising the maximum of such maps.

    Args:
        maximum: Of these queries on these keys.
        key: (..., rows, 1), positions i.
        query: (queries,), positions j.
        counts: (..., 1, queries), whether j is summed over.
    """
    weights = maximum.result().to(query.device).masked_fill(~counts | (query < key), float("-inf")).exp()
    return torch.where(query == key, weights, weights / 2)
