"""Steering: the last token is moved away from what another prompt makes of the same text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...lm import backbone
from ...lm.anatomy import output_projections
from ...lm.precision import for_summing
from ...lm.run import Hook, PassChange, StatesAt, at, put
from ...text.layout import Layout
from ...text.templates import USUAL_CONTRAST, Contrast, Template
from .change import Change, Fitted

#: The question whose answer a text's embedding shall not be.
IRRELEVANT = 'The irrelevant information of this sentence : "{text}" means in one word:"'

Scale = float | Literal["norm"]


@dataclass(frozen=True)
class Steer(Change):
    r"""In the attention of one layer, the layout's last token hands on its difference to that of another prompt.

    .. math:: v_n \leftarrow \alpha \, (v_n - v'_{n'})

    (Cheng et al., "Contrastive Prompting".) :math:`v_n` is what the last token n gives to the output projection of
    layer l, the values of all heads, weighted and side by side; :math:`v'_{n'}` is the same where the text stands in
    ``auxiliary_template``, in a pass of its own, which ends there.

    Attributes:
        contrast_layer: l, from 0; negative ones from the last layer that is run. None: the paper's for PromptEOL, index
            4 of 32, in proportion to the depth of the whole model, and no higher than the last layer that is run; a
            :class:`Contrast` says another share.
        scale: :math:`\alpha`; or ``"norm"``, which gives the difference the length of :math:`v_n`. None: 2.
        auxiliary_template: Text with one ``{text}``, or a name in :data:`st_reba.TEMPLATES`.
    """

    contrast_layer: int | Contrast | None = None
    scale: Scale | None = None
    auxiliary_template: str = IRRELEVANT
    key: ClassVar[str] = "steer"
    looks_ahead: ClassVar[bool] = False

    def __post_init__(self) -> None:
        layer, scale = self.contrast_layer, USUAL_CONTRAST.scale if self.scale is None else self.scale
        if layer is not None and not isinstance(layer, Contrast) and type(layer) is not int:
            raise ValueError(f"contrast_layer={layer!r}: give the index of a layer, or None for the paper's.")
        if scale != "norm" and (type(scale) not in (int, float) or not 0 < scale < inf):
            raise ValueError(f'scale={scale!r}: give a number above 0, or "norm" for the length before.')
        parsed = Template.parse(self.auxiliary_template)
        if parsed.copies != 1:
            raise ValueError(
                f"auxiliary_template={str(parsed)!r} has {parsed.copies} slots: the other prompt has the text once. "
                "Leave one {text} in it."
            )
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "auxiliary_template", str(parsed))

    def resolved(self, model: PreTrainedModel, whole_depth: int) -> Self:
        layer, depth = self.contrast_layer, backbone.depth(model)
        if layer is None or isinstance(layer, Contrast):
            return replace(self, contrast_layer=min((layer or USUAL_CONTRAST).index(whole_depth), depth - 1))
        if not -depth <= layer < depth:
            raise ValueError(
                f"contrast_layer={layer}: {depth} layers of {type(model).__name__} are run; use {-depth} to "
                f"{depth - 1}."
            )
        return replace(self, contrast_layer=layer % depth)

    @property
    def cost(self) -> str:
        assert isinstance(self.contrast_layer, int)
        return f"Before it, one pass over the first {self.contrast_layer + 1} layers, under another prompt."

    @property
    def companion(self) -> Template:
        return Template.parse(self.auxiliary_template)

    def fitted(self, model: PreTrainedModel) -> Fitted:
        assert isinstance(self.contrast_layer, int)
        assert self.scale is not None
        return _Steered(model, self.contrast_layer, self.scale)


class _Steered(Fitted):
    def __init__(self, model: PreTrainedModel, layer: int, scale: Scale) -> None:
        super().__init__()
        self.scale = scale
        projections = output_projections(model)
        if layer not in projections:
            raise ValueError(
                f"contrast_layer={layer}: this layer of {type(model).__name__} has no attention; those with attention "
                f"are {list(projections)}."
            )

        # By its path: an adapter may have taken its place when the model runs.
        self._projection = projections[layer]

    def observer(self, model: PreTrainedModel, companion: Layout) -> StatesAt:
        return StatesAt([model.get_submodule(self._projection)], "before", companion.ends, halts=True)

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        irrelevant, position = layout.beside[Steer.key], layout.ends

        def steer(states: Tensor) -> Tensor:
            return put(states, position, self._difference(at(states, position), irrelevant.to(states.device)))

        return PassChange(hooks={model.get_submodule(self._projection): Hook(before=steer)})

    def _difference(self, values: Tensor, irrelevant: Tensor) -> Tensor:
        difference = for_summing(values) - for_summing(irrelevant)
        length, before = (states.norm(dim=-1, keepdim=True) for states in (difference, for_summing(values)))
        # What differs by rounding alone is the same (so in a window that holds nothing but what both prompts end with):
        # it must not be blown up, here or by a norm that follows.
        same = length <= torch.finfo(values.dtype).eps ** 0.75 * before
        factor = before / length.masked_fill(same, 1) if self.scale == "norm" else self.scale
        return (factor * difference).masked_fill(same, 0)
