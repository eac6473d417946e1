"""Contrastive prompting: steer the last token away from what a text does not mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor

from ...lm import backbone
from ...lm.hooks import Tap, until_halted
from ...lm.precision import widened
from ...lm.projections import output_projections
from ...lm.run import Effect
from ...lm.states import StatesAt, at, put
from ...text.builder import Plan, lay_out
from ...text.layout import Layout
from ...text.templates import USUAL_CONTRAST, Contrast, Template, preset
from ..base import PoolOver
from ..readout import Reading
from .causal import check_one_copy
from .early_exit import EarlyExitModule

#: The second question, of what the first shall not be answered with.
IRRELEVANT = 'The irrelevant information of this sentence : "{text}" means in one word:"'

Scale = float | Literal["norm"]

# What the second layout's features are called: theirs with this in front.
_AUXILIARY = "auxiliary_"


@dataclass(frozen=True)
class TwoLayouts(Layout):
    """A batch under two prompts.

    Attributes:
        auxiliary: The same texts, truncated alike, under the second.
    """

    auxiliary: Layout

    def part(self, texts: slice | Tensor) -> TwoLayouts:
        return TwoLayouts(**vars(super().part(texts)), auxiliary=self.auxiliary.part(texts))


class ContrastivePromptingModule(EarlyExitModule):
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

    config_keys = [*EarlyExitModule.config_keys, "contrast_layer", "scale", "auxiliary_template"]
    PROMPTS_MAY_DIFFER = False
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
        model_name_or_path: str | Transformer,
        *,
        contrast_layer: int | None = None,
        scale: Scale | None = None,
        template: str = "prompteol",
        auxiliary_template: str = IRRELEVANT,
        output_layer: int | None = None,
        final_norm: bool | None = None,
        pool_over: PoolOver = "all",
        **transformer_kwargs: Any,
    ) -> None:
        if contrast_layer is not None and type(contrast_layer) is not int:
            raise ValueError(f"contrast_layer={contrast_layer!r}: give the index of a layer, or None for the paper's.")
        parsed, known = Template.parse(template), preset(template)
        contrast = known.contrast or USUAL_CONTRAST
        scale = contrast.scale if scale is None else scale
        if scale != "norm" and (type(scale) not in (int, float) or not 0 < scale < inf):
            raise ValueError(f'scale={scale!r}: give a number above 0, or "norm" for the length before.')
        if pool_over != "all":
            raise ValueError(f'pool_over={pool_over!r}: the last token answers the prompt, behind the text; use "all".')
        auxiliary = check_one_copy(Template.parse(auxiliary_template), type(self))
        super().__init__(
            model_name_or_path,
            template=parsed,
            preset=known,
            pool_over=pool_over,
            output_layer=output_layer,
            final_norm=final_norm,
            **transformer_kwargs,
        )
        self.auxiliary_template = str(auxiliary)
        self._auxiliary = self._laid_out(auxiliary)
        self.scale = scale
        self.contrast_layer = self._resolve(contrast_layer, contrast)
        self._projections = output_projections(self.model)
        if self.contrast_layer not in self._projections.paths:
            raise ValueError(
                f"contrast_layer={self.contrast_layer}: this layer of {type(self.model).__name__} has no attention; "
                f"those with attention are {list(self._projections.paths)}."
            )
        self._set_rows("last")

    def _resolve(self, layer: int | None, contrast: Contrast) -> int:
        depth = backbone.depth(self.model)
        if layer is None:
            return min(contrast.index(self._whole_depth), depth - 1)
        if not -depth <= layer < depth:
            raise ValueError(
                f"contrast_layer={layer}: {depth} layers of {type(self.model).__name__} are run; use {-depth} to "
                f"{depth - 1}."
            )
        return layer % depth

    @property
    def cost(self) -> str:
        return (
            f"One pass over the text, and one over its first {self.contrast_layer + 1} layers under the auxiliary "
            f"prompt, of {backbone.depth(self.model)} that are run."
        )

    def _plans(self) -> list[Plan]:
        return [*super()._plans(), Plan(self._auxiliary, self.tokenization)]

    def preprocess(self, inputs: Any, prompt: str | None = None, processing_kwargs: Any = None, **kwargs: Any) -> Any:
        """Lay texts out under both prompts, truncated alike: see :meth:`CausalModule.preprocess`.

        Returns:
            Besides what the base gives, the auxiliary layout: the same names with ``auxiliary_`` in front.
        """
        features = super().preprocess(inputs, prompt, processing_kwargs, **kwargs)
        auxiliary = vars(features.pop("auxiliary")) if features else {}
        return {**features, **{_AUXILIARY + name: part for name, part in auxiliary.items()}}

    def _lay_out(self, texts: Sequence[str], max_tokens: int | None, prompt: str | None) -> TwoLayouts:
        builders = self._builders()
        rows = lay_out(builders, texts, max_tokens=max_tokens, positions=self._positions(), prompt=prompt)
        main, auxiliary = (builder.framed(own) for builder, own in zip(builders, rows, strict=True))
        return TwoLayouts(**vars(main), auxiliary=auxiliary)

    def _handed_on(self, features: dict[str, Any], readings: list[Reading]) -> dict[str, Any]:
        given = super()._handed_on(features, readings)
        return {name: value for name, value in given.items() if not name.startswith(_AUXILIARY)}

    def _layout(self, features: dict[str, Any]) -> TwoLayouts:
        layout = super()._layout(features)
        auxiliary = Layout(*(features[_AUXILIARY + name] for name in vars(layout)))
        return TwoLayouts(**vars(layout), auxiliary=auxiliary)

    def _read(self, layout: Layout, **kwargs: Any) -> Reading:
        assert isinstance(layout, TwoLayouts)
        irrelevant = self._last_values(layout.auxiliary, **kwargs)
        position = _end(layout)

        def steer(states: Tensor) -> Tensor:
            return put(states, position, self._contrast(at(states, position), irrelevant.to(states.device)))

        projection = self._projections.at(self.model, self.contrast_layer)
        return self._read_tokens(layout, 0, 0, change=[Effect(taps={projection: Tap(before=steer)})], **kwargs)

    def _last_values(self, layout: Layout, **kwargs: Any) -> Tensor:
        """(B, H d): what the last token hands to the output projection of the contrast layer."""
        projection = self._projections.at(self.model, self.contrast_layer)
        values = StatesAt([projection], "before", _end(layout), halts=True)
        with until_halted():
            self.run(layout, observe=values, **kwargs)
        return values.states()[0]

    def _contrast(self, values: Tensor, irrelevant: Tensor) -> Tensor:
        difference = widened(values) - widened(irrelevant)
        length, before = (states.norm(dim=-1, keepdim=True) for states in (difference, widened(values)))
        # What differs by rounding alone is the same (so in a window that holds nothing but what both prompts end with):
        # it must not be blown up, here or by a norm that follows.
        same = length <= torch.finfo(values.dtype).eps ** 0.75 * before
        factor = before / length.masked_fill(same, 1) if self.scale == "norm" else self.scale
        return (factor * difference).masked_fill(same, 0)


def _end(layout: Layout) -> Tensor:
    """(B,): the last token of each row."""
    return layout.attention_mask.sum(dim=1) - 1
