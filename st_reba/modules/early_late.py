"""Early and late: what a text says word by word, and what a prompt makes of it, out of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from ..lm import backbone
from ..lm.anatomy import anatomy_of, layer_paths
from ..lm.run import StatesAt, at
from ..settings import optional, whole
from ..text.layout import Layout
from .causal_module import CausalModule, PoolOver
from .token_vectors import TokenVectors, picked

#: After which share of the layers the tokens are read.
EARLY = 1 / 8


class EarlyLateModule(CausalModule):
    r"""Word i is its own state after an early layer, and beside it the last state at the end of a prompt.

    .. math:: e_i = [h^{(l)}_i ; v_N], \quad i = 1, \dots, n

    with the residual stream :math:`h^{(l)}` after layer l and the last hidden state :math:`v_N` of the layout's last
    token. Early states tell which words a text has, in a little context; the state at the end of a prompt that asks for
    one word tells what it is about. Each is strong where the other is weak, and one pass over the prompt has both.

    With ``Pooling("mean")`` an embedding is :math:`[\frac{1}{n} \sum_i h^{(l)}_i ; v_N]`, (2D,). The halves are of very
    different sizes and shapes: :class:`st_reba.PartwiseWhitening`, fitted on a few hundred plain texts, stands behind
    it::

        module = EarlyLateModule(path)
        pooled = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "mean")])
        model = SentenceTransformer(modules=[*pooled, PartwiseWhitening.fit(pooled, texts)])

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        template: Text with one ``{text}``, or a name in :data:`st_reba.TEMPLATES`: ``"prompteol-zh"`` for Chinese. A
            name brings ``normalize_text``, ``output_layer`` and ``final_norm``, too; see :class:`CausalTransformer`.
        early_layer: l, counted from 1; at most the layer at which the model stops. None: an eighth of the model's
            layers, those above ``output_layer`` included.
        pool_over: ``"text"``: the tokens of the text are those that have a vector.
        **transformer_kwargs: As for :class:`CausalModule` and ST's ``Transformer``; ``output_layer`` and ``final_norm``
            are about the late state.

    Raises:
        ValueError: If a setting is out of range, the template has another number of slots, or the model is not causal,
            or its layers are not found, or the two states are not of one width.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "template", "early_layer"]
    shares = (0.3, 0.7)
    unfit_poolings = dict.fromkeys(
        sorted(set(Pooling.POOLING_MODES) - {"mean"}),
        'the early half of an embedding is the mean over the text\'s tokens. Use Pooling("mean").',
    )
    method = "Early and late"
    equation = r"e_i = [h^{(l)}_i ; v_N], \quad i = 1, \dots, n"
    citation = (
        "The prompt: Ting Jiang, Shaohan Huang, Zhongzhi Luan, Deqing Wang, Fuzhen Zhuang: Scaling Sentence Embeddings "
        "with Large Language Models. arXiv:2307.16645, 2023."
    )
    cost = (
        "One pass over the text and the template around it: the classical embedding of a text so much longer, "
        "with twice the dimensions."
    )

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        template: str = "prompteol",
        early_layer: int | None = None,
        pool_over: PoolOver | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        if pool_over not in (None, "text"):
            raise ValueError(f'pool_over={pool_over!r}: {type(self).__name__} has vectors for text only; use "text".')
        super().__init__(model_name_or_path, template=template, pool_over="text", rows="all", **transformer_kwargs)
        layers = backbone.depth(self.model)
        says = (
            f"{type(self.model).__name__} runs {layers} layers here; give the layer whose states are read, 1 to "
            f"{layers}, or None for an eighth of the way up."
        )
        optional(whole("early_layer", 1, layers, says)).check(early_layer)
        self.early_layer = early_layer or min(max(1, round(EARLY * self.whole_depth)), layers)
        check_one_width(self, [self.early_layer])
        self.equation = self.equation.replace("{(l)}", f"{{({self.early_layer})}}") + (
            rf", \quad h^{{({self.early_layer})}}: \text{{the states after layer {self.early_layer}}}, \quad "
            r"N: \text{the end of the prompt}"
        )
        self.no_words = (
            "gives all tokens of a text the same second half (the first half alone is that of CausalTransformer with "
            f"output_layer={self.early_layer} and final_norm=False)"
        )

    def get_embedding_dimension(self) -> int:
        """2D: early, then late."""
        return 2 * int(super().get_embedding_dimension())

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        early = StatesAt([self.layer(self.early_layer - 1)], "after")
        states = self.run(layout, change=[early.as_change()], **kwargs)
        # Where accelerate has placed the layers, each may lie on a device of its own.
        [words] = early.states()
        words, mask, ids, _ = picked(words.to(states), layout.input_ids, self.selected(layout))
        late = at(states, layout.ends)[:, None].expand_as(words)
        return TokenVectors(torch.cat([words, late], dim=-1), mask, ids)


def check_one_width(module: CausalModule, layers: Sequence[int]) -> None:
    """Refuse a model whose layers are not found, or that projects its last states to another width (some OPTs).

    Args:
        module: What reads it.
        layers: After which layers it is read, counted from 1, besides its end.
    """
    layer_paths(module.model)
    widths = anatomy_of(module.model).widths
    last = widths[-1]
    for width in (widths[layer - 1] for layer in layers):
        if module.final_norm and width != last:
            raise ValueError(
                f"{type(module.model).__name__} projects its last states from {width} values to {last}, and the parts "
                "of an embedding are of one width: use final_norm=False, which leaves the projection out."
            )
