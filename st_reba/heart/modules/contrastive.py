"""Contrastive prompting: what a prompt makes of a text, less what another prompt finds irrelevant in it.

Zifeng Cheng, Zhonghui Wang, Yuchen Fu, Zhiwei Jiang, Yafeng Yin, Cong Wang, Qing Gu: Contrastive Prompting Enhances
Sentence Embeddings in LLMs through Inference-Time Steering. ACL 2025.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor

from st_reba.text.templates import USUAL_CONTRAST, preset

from ..lm.passes import Replace, gather_positions, scatter_positions
from ..settings import first_not_none
from ..text.layout import Layout
from .base import CausalModule
from .vectors import TokenVectors

IRRELEVANT = 'The irrelevant information of this sentence : "{text}" means in one word:"'


class ContrastivePromptingModule(CausalModule):
    r"""In one layer, the last token's attention output is replaced by its difference to that of another prompt.

    .. math:: v_n \leftarrow \alpha \, (v_n - v'_{n'})

    with the values of all heads v before the output projection. The pass over the other prompt ends there.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        contrast_layer: Index of the layer, negative from the top. None: the paper's, in proportion to the depth.
        scale: :math:`\alpha`, or ``"norm"``, which gives the difference the length of :math:`v_n`. None: the paper's.
        template: Text with one slot, or a name.
        auxiliary_template: The other prompt.
        **settings: As for :class:`CausalModule`. ``output_layer`` None: 27 of 32 layers. ``final_norm`` None: False.
    """

    config_keys = [*CausalModule.config_keys, "template", "contrast_layer", "scale", "auxiliary_template"]
    equation = r"e = h_n, \quad v_n \leftarrow \alpha \, (v_n - v'_{n'})"
    has_token_vectors = False

    def __init__(
        self,
        model_name_or_path: str | Transformer,
        *,
        contrast_layer: int | None = None,
        scale: float | Literal["norm"] | None = None,
        template: str = "prompteol",
        auxiliary_template: str = IRRELEVANT,
        output_layer: int | float | None = None,
        final_norm: bool | None = None,
        normalize_text: bool | None = None,
        **settings: Any,
    ) -> None:
        known = preset(template)
        contrast = known.contrast or USUAL_CONTRAST
        super().__init__(
            model_name_or_path,
            template=[template, auxiliary_template],
            output_layer=first_not_none(output_layer, known.output_layer, 27 / 32),
            final_norm=first_not_none(final_norm, known.final_norm, False),
            normalize_text=first_not_none(normalize_text, known.normalize_text),
            **{**settings, "pool_over": "all", "rows": "last"},
        )
        # The share of the layers is one of the whole model: the layers above are cut.
        layer = contrast.index(self.whole_depth) if contrast_layer is None else contrast_layer
        [self.contrast_layer] = self.lm.resolve([min(layer, len(self.lm.layers) - 1)], "read")
        self.scale = first_not_none(scale, contrast.scale)
        self.auxiliary_template = str(self.layouter.templates[1])
        self.lm.projection(self.contrast_layer)

    def read(self, layout: Layout, auxiliary: Layout) -> TokenVectors:
        projection = self.lm.projection(self.contrast_layer)
        [irrelevant] = self.states_at(auxiliary, [projection], "before", auxiliary.ends)

        def steer(states: Tensor) -> Tensor:
            values = gather_positions(states, layout.ends)
            return scatter_positions(
                states, layout.ends, self._difference(values.float(), irrelevant.to(values).float())
            )

        states = self.run(layout, Replace([projection], inputs=steer))
        return TokenVectors.pick(states, layout, self.selected(layout))

    def _difference(self, values: Tensor, irrelevant: Tensor) -> Tensor:
        difference = values - irrelevant
        length, before = difference.norm(dim=-1, keepdim=True), values.norm(dim=-1, keepdim=True)
        # Two equal states differ by rounding, which must not be scaled up.
        same = length <= torch.finfo(values.dtype).eps ** 0.75 * before
        factor = before / length.masked_fill(same, 1) if self.scale == "norm" else self.scale
        return (factor * difference).masked_fill(same, 0)
