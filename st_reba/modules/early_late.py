"""Early and late: what a text says word by word, and what a prompt makes of it, out of one pass."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor

from .. import backbone
from ..layout import Layout, Template
from ..taps import Tap, tapping
from ..templates import preset
from .base import CausalModule, PoolOver, Reading, at, compact, last_position
from .causal import check_one_copy

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
    it.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        template: Text with one ``{text}``, or a name in :data:`st_reba.TEMPLATES`: ``"prompteol-zh"`` for Chinese.
        early_layer: l, counted from 1, of the layers that are run. None: an eighth of the way up.
        pool_over: ``"text"``: the tokens of the text are those that have a vector.
        **transformer_kwargs: As for :class:`CausalModule` and ST's ``Transformer``.

    Raises:
        ValueError: If ``early_layer`` is out of range, the template has another number of slots, or the model is not
            causal, or its layers are not found.
    """

    config_keys = [*CausalModule.config_keys, "template", "early_layer"]
    READS_HIDDEN_STATES = False
    method = "Early and late"
    equation = r"e_i = [h^{(l)}_i ; v_N], \quad i = 1, \dots, n"
    citation = ""

    def __init__(
        self,
        model_name_or_path: str | Transformer,
        *,
        template: str = "prompteol",
        early_layer: int | None = None,
        pool_over: PoolOver | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        if pool_over not in (None, "text"):
            raise ValueError(f'pool_over={pool_over!r}: {type(self).__name__} has vectors for text only; use "text".')
        parsed, known = check_one_copy(Template.parse(template), type(self)), preset(template)
        super().__init__(model_name_or_path, template=parsed, preset=known, pool_over="text", **transformer_kwargs)
        self.template = str(parsed)
        layers = backbone.depth(self.model)
        self.early_layer = max(1, round(EARLY * layers)) if early_layer is None else early_layer
        if type(self.early_layer) is not int or not 1 <= self.early_layer <= layers:
            raise ValueError(
                f"early_layer={early_layer!r}: {type(self.model).__name__} runs {layers} layers here; give the layer "
                f"whose states are read, 1 to {layers}."
            )
        # Found now, so that a model whose layers are not found is refused now.
        self._layer_places()

    def get_embedding_dimension(self) -> int:
        """2D: early, then late."""
        return 2 * int(super().get_embedding_dimension())

    def _read(self, layout: Layout, **kwargs: Any) -> Reading:
        self._refuse_checkpointing()
        early: list[Tensor] = []

        def take(states: Tensor) -> Tensor:
            early.append(states)
            return states

        place = self._layer_places().at(self.model, self.early_layer - 1)
        with tapping({place: Tap(after=take)}):
            states = self._hidden_states(layout, **kwargs)
        end = last_position(layout.attention_mask.bool())
        late = at(states, end)[:, None].expand_as(states)
        return compact(torch.cat([early[0].to(late), late], dim=-1), layout.input_ids, self._select(layout, 0, 0))
