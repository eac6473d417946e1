"""Early and late: the words after an early layer, and the end of a prompt after the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sentence_transformers.sentence_transformer.modules import Pooling

from ..lm.passes import Capture, gather_positions
from ..lm.views import depth
from ..settings import check_int, first_not_none
from ..text.layout import Layout
from .base import CausalModule, ModelSource
from .vectors import TokenVectors


class EarlyLateModule(CausalModule):
    r"""Word i is its state after an early layer l, followed by the last state of the prompt.

    .. math:: e_i = [h^{(l)}_i ; v_N], \quad i = 1, \dots, n

    Early states show which words a text has; the state at the end of a prompt that asks for one word shows its subject.
    The halves are of very different sizes: :class:`st_reba.PartwiseWhitening`, fitted on a few hundred plain texts,
    follows ``Pooling("mean")``::

        module = EarlyLateModule(path)
        pooled = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "mean")])
        model = SentenceTransformer(modules=[*pooled, PartwiseWhitening.fit(pooled, texts)])

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        template: Text with one slot, or a name.
        early_layer: The layer l, counted from 1. None: an eighth of the way up the whole model.
        **settings: As for :class:`CausalModule`. ``output_layer`` and ``final_norm`` are those of the late state.
            ``pool_over`` is ``"text"``: the words of the text have vectors.
    """

    config_keys = [*CausalModule.config_keys, "template", "early_layer"]
    method = "Early and late"
    equation = r"e_i = [h^{(l)}_i ; v_N], \quad i = 1, \dots, n, \quad N: \text{the end of the prompt}"
    citation = (
        "The prompt: Ting Jiang, Shaohan Huang, Zhongzhi Luan, Deqing Wang, Fuzhen Zhuang: Scaling Sentence Embeddings "
        "with Large Language Models. arXiv:2307.16645, 2023."
    )
    cost = (
        "One pass over the text and the template around it: the classical embedding of a text so much longer, "
        "with twice the dimensions."
    )
    has_token_vectors = False
    fixed = {"pool_over": "text", "rows": "all"}
    part_weights = (0.3, 0.7)
    incompatible_poolings = dict.fromkeys({*Pooling.POOLING_MODES} - {"mean"}, 'a part is a mean. Use Pooling("mean").')

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        template: str = "prompteol",
        early_layer: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model_name_or_path, template=template, **settings)
        count = depth(self.model)
        default = min(count, max(1, round(self.whole_depth / 8)))
        advice = f"give a layer from 1 to {count}, or None for an eighth of the way up."
        self.early_layer = check_int("early_layer", first_not_none(early_layer, default), 1, count, advice)
        check_widths(self, [self.early_layer])

    def read(self, layout: Layout) -> TokenVectors:
        early = Capture([self.lm.layers[self.early_layer - 1]], "after")
        v = self.run(layout, early)
        words = TokenVectors.pick(early.states[0].to(v), layout, self.selected(layout))
        return words.followed_by(gather_positions(v, layout.ends))


def check_widths(module: CausalModule, layers: Sequence[int]) -> None:
    """Raise if a model projects its last states to another width than that of layers, counted from 1, as some OPTs do.

    Raises:
        ValueError: If it does.
    """
    *widths, last = module.lm.widths
    if module.final_norm and any(widths[layer - 1] != last for layer in layers):
        raise ValueError(
            f"{type(module.model).__name__} projects its last states from {widths[-1]} values to {last}, and the parts "
            "of an embedding have one width: use final_norm=False, which leaves the projection out."
        )
