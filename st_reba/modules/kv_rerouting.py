"""KV re-routing: every token sees what the last one knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..lm.attention.hooks import ExtraKey
from ..lm.views import depth
from ..settings import check, check_flag, first_not_none
from ..text.layout import Layout
from .base import ModelSource
from .causal import CausalTransformer
from .vectors import TokenVectors


class KVReroutingModule(CausalTransformer):
    r"""In some layers, the key and value of the last token precede all others, visible to every token.

    .. math:: \tilde K = [k_n; K], \quad \tilde V = [v_n; V], \quad
        o_i = \mathrm{softmax}\left(\tfrac{q_i \tilde K_{\le i}^T}{\sqrt d} + [b, 0, \dots]\right) \tilde V_{\le i}

    The embedding is the average of the mean of the tokens' last hidden states and the last one's,

    .. math:: e = \tfrac{1}{2} \left( \tfrac{1}{m} \sum_i v_i + v_m \right)

    scaled to length 1: use ``Pooling("mean")`` and ``Normalize()``.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        layers: Indices of the layers, negative ones from the top. None: the middle third.
        prefix_bias: b, added to the logit of the key that precedes all others.
        template: Text with one slot, or a name.
        hybrid: Whether two vectors are returned, the mean of the tokens and the last of them, whose mean is the paper's
            embedding. False: every token, or the last, as ``rows`` says.
        **settings: As for :class:`CausalModule`. ``pool_over`` None: ``"all"``. ``rows`` counts without ``hybrid``.
    """

    config_keys = [*CausalTransformer.config_keys, "layers", "prefix_bias", "hybrid"]
    method = "KV re-routing"
    equation = (
        r"e = \tfrac{1}{2} \left( \tfrac{1}{m} \sum_i v_i + v_m \right), \quad "
        r"\tilde K = [k_n; K], \ \tilde V = [v_n; V] \text{ in some layers}"
    )
    citation = (
        "Yixuan Tang, Yi Yang: KV-Embedding: Training-free Text Embedding via Internal KV Re-routing in Decoder-only "
        "LLMs. ACL 2026."
    )
    cost = "One pass over the text and the template; one more key a layer: little more than the classical embedding."
    reads_prefix = True
    defaults = {"pool_over": "all"}

    def __init__(
        self,
        model_name_or_path: ModelSource,
        *,
        layers: Sequence[int] | None = None,
        prefix_bias: float = 0.0,
        template: str = "compress",
        hybrid: bool = True,
        **settings: Any,
    ) -> None:
        is_finite = type(prefix_bias) in (int, float) and math.isfinite(prefix_bias)
        check("prefix_bias", prefix_bias, is_finite, "give a finite number; 0 changes no logit.")
        if check_flag("hybrid", hybrid):
            # The mean needs all tokens.
            settings["rows"] = "all"
        super().__init__(model_name_or_path, template=template, **settings)
        count = depth(self.model)
        default = range(count // 3, count - count // 3)
        self.layers = list(self.lm.resolve(first_not_none(layers, default), "re-routed"))
        self.prefix_bias, self.hybrid = float(prefix_bias), hybrid

    def read(self, layout: Layout) -> TokenVectors:
        v = self.run(layout, ExtraKey(self.layers, layout.ends, self.prefix_bias))
        tokens = TokenVectors.pick(v, layout, self.selected(layout))
        return tokens.mean_and_last() if self.hybrid else tokens
