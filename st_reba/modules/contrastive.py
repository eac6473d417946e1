"""Contrastive prompting: what a prompt makes of a text, less what another prompt finds irrelevant in it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..lm.attention.kernels import widen
from ..lm.passes import Replace, gather_positions, scatter_positions
from ..lm.views import depth
from ..settings import check, check_int, first_not_none
from ..text.layout import Layout
from ..text.presets import DEFAULT_CONTRAST, preset
from .base import CausalModule, ModelSource
from .vectors import TokenVectors

#: The question whose answer a text's embedding shall not have.
IRRELEVANT = 'The irrelevant information of this sentence : "{text}" means in one word:"'


class ContrastivePromptingModule(CausalModule):
    r"""In one layer, the last token's attention output is replaced by its difference to that of another prompt.

    .. math:: v_n \leftarrow \alpha \, (v_n - v'_{n'})

    with the values of all heads v before the output projection. The pass over the other prompt ends there.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        contrast_layer: Index of the layer, negative from the top. None: the paper's, in proportion to the depth of the
            whole model.
        scale: :math:`\alpha`, or ``"norm"``, which gives the difference the length of :math:`v_n`. None: the paper's.
        template: Text with one slot, or a name.
        auxiliary_template: The other prompt.
        **settings: As for :class:`CausalModule`. ``pool_over`` is ``"all"``: n is the last token of the layout.
            ``output_layer`` None: 27 of 32 layers. ``final_norm`` None: False.
    """

    config_keys = [*CausalModule.config_keys, "template", "contrast_layer", "scale", "auxiliary_template"]
    method = "Contrastive prompting"
    equation = (
        r"e = h_n, \quad \text{where in layer } l \text{ attention returns } "
        r"v_n \leftarrow \alpha \, (v_n - v'_{n'}) \text{ with } v' \text{ from the auxiliary prompt}"
    )
    citation = (
        "Zifeng Cheng, Zhonghui Wang, Yuchen Fu, Zhiwei Jiang, Yafeng Yin, Cong Wang, Qing Gu: Contrastive Prompting "
        "Enhances Sentence Embeddings in LLMs through Inference-Time Steering. ACL 2025."
    )
    cost = "One pass over the text, and one over its first layers under the auxiliary prompt."
    has_token_vectors = False
    fixed = {"pool_over": "all", "rows": "last"}
    defaults = {"output_layer": 27 / 32, "final_norm": False}

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        contrast_layer: int | None = None,
        scale: float | Literal["norm"] | None = None,
        template: str = "prompteol",
        auxiliary_template: str = IRRELEVANT,
        **settings: Any,
    ) -> None:
        known = preset(template)
        contrast = known.contrast or DEFAULT_CONTRAST
        scale = contrast.scale if scale is None else scale
        is_factor = scale == "norm" or (type(scale) in (int, float) and 0 < scale < math.inf)
        check("scale", scale, is_factor, 'give a number above 0, or "norm" for the length before.')
        auxiliary = replace(known, template=preset(auxiliary_template).template)
        super().__init__(model_name_or_path, template=[known, auxiliary], **settings)
        count = depth(self.model)
        default = min(contrast.index(self.whole_depth), count - 1)
        advice = f"give the index of one of {count} layers, {-count} to {count - 1}, or None for the paper's."
        layer = check_int("contrast_layer", first_not_none(contrast_layer, default), -count, count - 1, advice)
        self.contrast_layer = layer % count
        self.scale, self.auxiliary_template = scale, str(self._templates[1])
        # Raises if it is not found.
        self.lm.projection(self.contrast_layer)

    def read(self, layout: Layout, auxiliary: Layout) -> TokenVectors:  # type: ignore[override]
        projection = self.lm.projection(self.contrast_layer)
        hooks = self.own_hooks(auxiliary)
        [irrelevant] = self.lm.states_at(auxiliary, [projection], "before", auxiliary.ends, *hooks)

        def steer(states: Tensor) -> Tensor:
            v = gather_positions(states, layout.ends)
            return scatter_positions(states, layout.ends, self._contrast(widen(v), widen(irrelevant.to(v))))

        states = self.run(layout, Replace([projection], inputs=steer))
        return TokenVectors.pick(states, layout, self.selected(layout))

    def _contrast(self, v: Tensor, irrelevant: Tensor) -> Tensor:
        difference = v - irrelevant
        length, before = difference.norm(dim=-1, keepdim=True), v.norm(dim=-1, keepdim=True)
        # Two equal states differ by rounding, which must not be scaled up.
        same = length <= torch.finfo(v.dtype).eps ** 0.75 * before
        factor = before / length.masked_fill(same, 1) if self.scale == "norm" else self.scale
        return (factor * difference).masked_fill(same, 0)
