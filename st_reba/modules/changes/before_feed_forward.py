"""The last layer without its feed-forward part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel

from ...lm import decoder
from ...lm.run import Effect
from ...text.layout import Layout
from .change import Change, Fitted


@dataclass(frozen=True)
class BeforeFeedForward(Change):
    """What is read is the residual stream before the feed-forward part of the layer at which the model ends.

    That part turns a state towards the words that the head will choose from, as Zhu et al. find. It is not run. The
    final norm, if it is read through, stands behind.
    """

    citation: ClassVar[str] = (
        "Yuhan Zhu, Xiangyu Zeng, Chenting Wang, Xinhao Li, Yicheng Xu, Ziang Yan, Yi Wang, Limin Wang: FreeRet: MLLMs "
        "as Training-Free Retrievers. arXiv:2509.24621, 2025."
    )
    key: ClassVar[str] = "before-mlp"
    looks_ahead: ClassVar[bool] = False

    def fitted(self, model: PreTrainedModel) -> Fitted:
        return _LeftOut(decoder.FeedForward(model))

    def __str__(self) -> str:
        return 'readout="before_mlp"'


class _LeftOut(Fitted):
    def __init__(self, part: decoder.FeedForward) -> None:
        super().__init__()
        self.part = part

    def effect(self, model: PreTrainedModel, layout: Layout) -> Effect:
        return Effect(hooks=self.part.left_out(model))
