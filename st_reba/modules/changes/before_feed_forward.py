"""The last layer without its feed-forward part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from ...lm.anatomy import feed_forward
from ...lm.run import Hook, PassChange
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
        paths = feed_forward(model)
        if not paths:
            raise ValueError(
                f"The feed-forward part of the last layer of {type(model).__name__} was not found as a part of its "
                'own, so the state before it cannot be read. Use readout="layer".'
            )
        return _LeftOut(paths)

    def __str__(self) -> str:
        return 'readout="before_mlp"'


class _LeftOut(Fitted):
    def __init__(self, paths: tuple[str, ...]) -> None:
        super().__init__()
        self.paths = paths

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        return PassChange(hooks={model.get_submodule(path): _adding_nothing() for path in self.paths})


def _adding_nothing() -> Hook:
    """A part that gives zeros, whatever it is given, and is run for one token alone."""
    given: list[Tensor] = []

    def before(states: Tensor) -> Tensor:
        given.append(states)
        # Not none: experts and kernels need not take it.
        return states[:1, :1]

    def after(states: Tensor) -> Tensor:
        return states.new_zeros(*given.pop().shape[:-1], states.shape[-1])

    return Hook(before, after)
