"""Both ways, no sink: the upper layers attend both ways, and in the last of them the first token is hidden."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..lm.attention.hooks import see_something
from ..lm.passes import AttentionCall, Hook
from ..settings import first_not_none
from ..text.layout import Layout
from .base import ModelSource
from .causal import CausalTransformer


@dataclass(eq=False)
class HideFirstToken(Hook):
    """Hide the first token of each row from all others. It sees itself.

    Attributes:
        layers: Indices of the layers.
    """

    layers: Collection[int] = field()

    def before_attention(self, call: AttentionCall) -> None:
        key = torch.arange(call.key.shape[2], device=call.query.device)
        query = key[:, None]
        hidden = (key == 0) & (key != query)
        mask = call.mask
        if mask is None:
            mask = (key <= query if call.causal else torch.ones_like(hidden))[None, None]
        call.causal = False
        if mask.dtype == torch.bool:
            call.mask = see_something(mask & ~hidden)
        else:
            call.mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


class NoSinkModule(CausalTransformer):
    r"""The upper half of the layers attends both ways, and the upper half of these hides the first token.

    .. math:: A_{j1} = 0, \quad j > 1

    (Lin et al., MASK0&BIDIR; the numbers of layers are this package's choice.) Most heads attend mainly to the first
    token of the whole input, the sink. Where it is hidden, the other weights of each token sum to 1.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        layers: Indices of the layers that hide the first token; negative ones from the top. None: the upper half of
            those that attend both ways.
        bidirectional_layers: Number of last layers that attend both ways, or a share of the layers. None: half.
        **settings: As for :class:`CausalModule`.

    Raises:
        ValueError: If a setting is out of range, or the attention of these layers cannot be changed.
    """

    config_keys = [*CausalTransformer.config_keys, "layers"]
    method = "Both ways, no sink"
    equation = r"e_i = v_i, \quad \text{the upper layers without the causal mask, in the last of which } A_{j1} = 0"
    citation = (
        "Ziyong Lin, Haoyi Wu, Shu Wang, Kewei Tu, Zilong Zheng, Zixia Jia: Look Both Ways and No Sink: Converting "
        "LLMs into Text Encoders without Training. ACL 2025."
    )

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        layers: Sequence[int] | None = None,
        bidirectional_layers: int | float | None = None,
        **settings: Any,
    ) -> None:
        share = first_not_none(bidirectional_layers, 0.5)
        super().__init__(model_name_or_path, bidirectional_layers=share, **settings)
        depth = len(self.lm.layers)
        top = range(depth - max(1, self.bidirectional_layers // 2), depth)
        self.layers = list(self.lm.resolve(first_not_none(layers, top), "changed"))

    def own_hooks(self, layout: Layout) -> tuple[Hook, ...]:
        return (*super().own_hooks(layout), HideFirstToken(self.layers))
