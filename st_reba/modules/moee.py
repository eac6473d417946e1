"""MoEE: which experts a model would ask, beside what it makes of a text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from ..lm.anatomy import routers
from ..lm.run import StatesAt
from ..settings import Setting, optional
from ..text.layout import Layout
from .causal_module import CausalModule, PoolOver, Rows
from .changes import BeforeFeedForward
from .remote_states import RemoteStates
from .token_vectors import TokenVectors, last_of, picked

ALPHA: Setting[float | None] = optional(
    Setting(
        "alpha",
        lambda value: type(value) in (int, float) and 0 < value < math.inf,
        "give a number above 0, how much the router weights count beside the hidden state, or None.",
    )
)


class MoEEModule(CausalModule):
    r"""Word i is its last hidden state, and beside it the router weights of all layers.

    .. math::
        e_i = [h_i ; r_i], \qquad r_i = \big[ \mathrm{softmax}(g^{(l)}_i) \big]_{l = 1, \dots, L}

    with the last hidden state :math:`h_i` of token i and the logits :math:`g^{(l)}_i` that the router of layer l gives
    its experts, all of them, before it chooses. For a mixture-of-experts model alone.

    The paper adds the similarities of the two parts: :math:`\cos(h, h') + \alpha \cos(r, r')`. One vector whose parts
    have the squared lengths :math:`1 / (1 + \alpha)` and :math:`\alpha / (1 + \alpha)` has that as its cosine, divided
    by :math:`1 + \alpha`; so does this module, by default::

        module = MoEEModule(path)
        model = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "lasttoken")])

    The authors' code standardises each part over the texts of a batch first. :class:`st_reba.PartwiseWhitening` does so
    over a collection: ``alpha=None`` hands on the parts as they are, to be fitted on.

    Both parts have one width, that of the wider: zeros stand behind the other, which no cosine sees.

    Args:
        model_name_or_path: A mixture-of-experts model's path or Hub id, or a loaded ``Transformer`` to share.
        alpha: :math:`\alpha`, above 0; both parts of each token have the lengths above. None: they are as the model
            gives them, and each counts half behind :class:`st_reba.PartwiseWhitening`.
        template: Text with one ``{text}``, or a name in :data:`st_reba.TEMPLATES`. A name brings how its authors read
            it; see :class:`CausalTransformer`.
        pool_over: Which tokens are handed on; see :class:`CausalModule`. None: as the template's name says, or the
            text's.
        rows: ``"all"`` of these tokens, or the ``"last"`` alone. None: as the template's name says, or all.
        **transformer_kwargs: As for :class:`CausalModule` and ST's ``Transformer``.

    Raises:
        ValueError: If a setting is out of range, the template has another number of slots, or the model is not causal,
            or none of its layers routes tokens to experts.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "template", "rows", ALPHA.name]
    reads_hidden_states = False
    unfit_changes = {
        BeforeFeedForward: "the router of the last layer stands in its feed-forward part, which is not run"
    }
    method = "MoEE"
    equation = r"e_i = [h_i ; r_i], \quad r_i = \big[ \mathrm{softmax}(g^{(l)}_i) \big]_{l = 1, \dots, L}"
    citation = "Ziyue Li, Tianyi Zhou: Your Mixture-of-Experts LLM Is Secretly an Embedding Model for Free. ICLR 2025."

    def __init__(
        self,
        model_name_or_path: str | nn.Module,
        *,
        alpha: float | None = 1.0,
        template: str = "prompteol",
        pool_over: PoolOver | None = None,
        rows: Rows | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        self.alpha = ALPHA.check(alpha)
        counts = 1.0 if self.alpha is None else self.alpha
        self.shares = (1 / (1 + counts), counts / (1 + counts))
        super().__init__(model_name_or_path, template=template, pool_over=pool_over, rows=rows, **transformer_kwargs)
        #: The experts of each router, by its path, in the order in which they run.
        self.routers = {} if isinstance(self.model, RemoteStates) else routers(self.model)
        if not self.routers:
            raise ValueError(
                f"{type(self.model).__name__} routes no token to experts: {type(self).__name__} reads a "
                "mixture-of-experts model, such as Qwen3-MoE, OLMoE or Mixtral. Use another recipe for this one."
            )
        #: Values of each part.
        self.width = max(int(super().get_embedding_dimension()), sum(self.routers.values()))

    def get_embedding_dimension(self) -> int:
        """Twice the width of the wider part: hidden state, then router weights."""
        return 2 * self.width

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        selected = self.selected(layout)
        if self.rows == "last":
            selected = last_of(selected)
        seen = StatesAt([self.model.get_submodule(path) for path in self.routers], "after")
        states = self.run(layout, change=[seen.as_change()], **kwargs)
        # A router is given the tokens of all rows as one list.
        weights = [logits.float().softmax(dim=-1).view(*layout.input_ids.shape, -1) for logits in seen.states()]
        routed = torch.cat([each.to(states) for each in weights], dim=-1)
        parts = [self._part(part, share) for part, share in zip((states, routed), self.shares, strict=True)]
        return picked(torch.cat(parts, dim=-1), layout.input_ids, selected)

    def _part(self, values: Tensor, share: float) -> Tensor:
        """(B, N, W): values (B, N, D) at the length of their share, and zeros."""
        if self.alpha is not None:
            values = normalize(values, dim=-1) * math.sqrt(share)
        return pad(values, (0, self.width - values.shape[-1]))
