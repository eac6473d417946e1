"""Layers without the causal mask."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

from transformers import PreTrainedModel

from ...lm.attention import routes
from ...lm.attention.changes import Bidirectional
from ...lm.run import PassChange
from ...text.layout import Layout
from .change import Change, Fitted


@dataclass(frozen=True)
class AttendBothWays(Change):
    """The last layers attend to later tokens too, as in BeLLM; padding stays hidden.

    Attributes:
        bidirectional_layers: How many, 1 or more.
    """

    bidirectional_layers: int = 1
    key: ClassVar[str] = "attend-both-ways"
    replaces: ClassVar[Literal["masks"]] = "masks"

    def __post_init__(self) -> None:
        if type(self.bidirectional_layers) is not int or self.bidirectional_layers < 1:
            raise ValueError(
                f"bidirectional_layers={self.bidirectional_layers!r}: give the number of last layers that attend both "
                "ways, 1 or more."
            )

    def fitted(self, model: PreTrainedModel) -> Fitted:
        return _Turned(routes.make_bidirectional(model, self.bidirectional_layers))


class _Turned(Fitted):
    def __init__(self, layers: Collection[int]) -> None:
        super().__init__()
        self.layers = layers

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        padded = not bool(layout.on_host.attention_mask.all())
        return PassChange(masking=Bidirectional(self.layers, layout.attention_mask.bool(), padded))
