"""KV re-routing: every token sees what the last one knows."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from ..lm.backbone import for_summing
from ..settings import flag
from .causal_module import PoolOver, Rows
from .causal_transformer import CausalTransformer
from .changes import Reroute
from .token_vectors import TokenVectors

HYBRID = flag("hybrid")


class KVReroutingModule(CausalTransformer):
    r"""In some layers, the last token's own key and value stand before all others, where every token sees them.

    .. math:: \tilde K = [k_n; K], \quad \tilde V = [v_n; V], \quad
        o_i = \mathrm{softmax}\left(\tfrac{q_i \tilde K_{\le i}^T}{\sqrt d} + [b, 0, \dots]\right) \tilde V_{\le i}

    (Tang and Yang, "KV-Embedding".) One pass: a layer's keys and values are as it computed them, rotary positions
    included, and the causal mask hides all later tokens but that one. The embedding is the average of the mean of the
    tokens' last hidden states and the last one's,

    .. math:: e = \tfrac{1}{2} \left( \tfrac{1}{m} \sum_i v_i + v_m \right)

    scaled to length 1: use ``Pooling("mean")`` and ``Normalize()``.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        layers: The indices of the layers; negative ones from the top. None: the middle third.
        prefix_bias: b, added to the logit of the key that stands before all others.
        template: Text with one ``{text}``, or a name in :data:`st_reba.TEMPLATES`; see :class:`CausalTransformer`.
        pool_over: ``"all"``, ``"text"`` or ``"whole"``; see :class:`CausalModule`. The last token is that of the whole
            layout. None: ``"all"``.
        hybrid: Hand on two vectors a text, (B, 2, D): the mean of the tokens that ``pool_over`` names, and the last of
            them. ``Pooling("mean")`` then gives the paper's embedding, ``Pooling("lasttoken")`` the last token alone.
            False: every token, or the last, as ``rows`` says.
        rows: As for :class:`CausalTransformer`, without ``hybrid``; with it, always ``"all"``.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If a layer is out of range, or does not call transformers' attention interface, or the model is not
            causal.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

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

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        layers: Sequence[int] | None = None,
        prefix_bias: float = 0.0,
        template: str = "compress",
        pool_over: PoolOver | None = None,
        hybrid: bool = True,
        rows: Rows | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        self.changes = [Reroute(layers, prefix_bias)]
        self.hybrid = HYBRID.check(hybrid)
        if hybrid and rows == "last":
            raise ValueError(
                'rows="last" hands on the last token alone, and hybrid=True needs the mean of all of them too: '
                "set hybrid=False, or leave rows out."
            )
        # The mean needs them all, however the template's authors read it.
        rows = "all" if hybrid else rows
        super().__init__(
            model_name_or_path,
            template=template,
            pool_over="all" if pool_over is None else pool_over,
            rows=rows,
            **transformer_kwargs,
        )
        made = self.change(Reroute)
        self.layers = list(made.layers or ())
        self.prefix_bias = made.prefix_bias

    def combined(self, vectors: TokenVectors) -> TokenVectors:
        """With ``hybrid``, the mean of the tokens, and the last of them."""
        return _mean_and_last(vectors) if self.hybrid else vectors


def _mean_and_last(tokens: TokenVectors) -> TokenVectors:
    """Two vectors a text: the mean of its tokens, and the last of them, whose id stands for both."""
    mask = tokens.mask[..., None]
    count = tokens.mask.sum(dim=1).clamp(min=1)
    mean = (for_summing(tokens.states) * mask).sum(dim=1) / count[:, None]
    text = torch.arange(len(count), device=count.device)
    last = tokens.states[text, count - 1]
    states = torch.stack([mean.to(last.dtype), last], dim=1)
    return TokenVectors(states, tokens.mask[:, :1].expand(-1, 2), tokens.ids[text, count - 1][:, None].expand(-1, 2))
