"""Contrastive prompting: steer the last token away from what a text does not mean."""

from __future__ import annotations

from os import PathLike
from typing import Any, cast

from torch import nn

from ..lm import backbone
from ..settings import Setting, choice
from ..text.templates import USUAL_CONTRAST, preset
from .causal_module import CausalModule, PoolOver
from .changes import IRRELEVANT, Scale, Steer
from .token_prepending import stopping_early

AT_THE_END: Setting[PoolOver] = choice(
    "pool_over", "all", says='the last token answers the prompt, behind the text; use "all".'
)


class ContrastivePromptingModule(CausalModule):
    r"""The last token of one prompt, less what another prompt finds irrelevant.

    In the attention of layer l, what the last token n hands to the output projection (the values of all heads, weighted
    and side by side) becomes

    .. math:: v_n \leftarrow \alpha \, (v_n - v'_{n'})

    where :math:`v'_{n'}` is the same of the last token under the auxiliary prompt; the rest of the pass goes on from
    there, and the embedding is the last token's state after ``output_layer``. The auxiliary pass ends where it is read:
    before the output projection of layer l.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        contrast_layer: l, from 0; negative ones from the last layer that is run. None: the paper's, in proportion to
            the depth of the whole model, and no higher than the last layer that is run: of 32 layers index 4, or 6
            under Pretended CoT and Knowledge.
        scale: :math:`\alpha`; or ``"norm"``, which gives the difference the length of :math:`v_n`. None: the paper's,
            2, or 3 under Pretended CoT and Knowledge.
        template: Text with one ``{text}``, or a name in :data:`st_reba.TEMPLATES`. A name brings ``normalize_text``
            and, for Pretended CoT and Knowledge, ``output_layer``, too; see :class:`CausalTransformer`.
        auxiliary_template: The same for the second prompt.
        output_layer: After which layer to stop, counted from 1, or from the top if negative. None: 27 of 32 layers, in
            proportion, unless the template's name says otherwise; -1: all.
        final_norm: Whether the embedding goes through the model's final norm. None: False, as in the paper: it is a
            state of the residual stream.
        pool_over: ``"all"``: the last token is that of the layout.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If a setting is out of range, or the model is not causal, or cannot stop after ``output_layer``, or
            its output projections are not found.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "template", "contrast_layer", "scale", "auxiliary_template"]
    method = "Contrastive prompting"
    equation = (
        r"e = h_n, \quad \text{where in layer } l \text{ attention hands on } "
        r"v_n \leftarrow \alpha \, (v_n - v'_{n'}) \text{ with } v' \text{ from the auxiliary prompt}"
    )
    citation = (
        "Zifeng Cheng, Zhonghui Wang, Yuchen Fu, Zhiwei Jiang, Yafeng Yin, Cong Wang, Qing Gu: Contrastive Prompting "
        "Enhances Sentence Embeddings in LLMs through Inference-Time Steering. ACL 2025."
    )

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        contrast_layer: int | None = None,
        scale: Scale | None = None,
        template: str = "prompteol",
        auxiliary_template: str = IRRELEVANT,
        pool_over: PoolOver = "all",
        **transformer_kwargs: Any,
    ) -> None:
        known = preset(template)
        contrast = known.contrast or USUAL_CONTRAST
        layer = contrast if contrast_layer is None else contrast_layer
        self.changes = [Steer(layer, contrast.scale if scale is None else scale, auxiliary_template)]
        super().__init__(
            model_name_or_path,
            template=template,
            preset=stopping_early(known),
            pool_over=AT_THE_END.check(pool_over),
            rows="last",
            **transformer_kwargs,
        )
        made = self.change(Steer)
        self.contrast_layer = cast(int, made.contrast_layer)
        self.scale = made.scale
        self.auxiliary_template = made.auxiliary_template

    @property
    def cost(self) -> str:
        return (
            f"One pass over the text, and one over its first {self.contrast_layer + 1} layers under the auxiliary "
            f"prompt, of {backbone.depth(self.model)} that are run."
        )
