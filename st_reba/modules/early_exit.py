"""What the methods share that read one copy under a prompt, after a layer below the last."""

from __future__ import annotations

from typing import Any

from sentence_transformers.base.modules import Transformer
from torch import Tensor

from .. import backbone
from ..all_layers import beside
from ..layout import Layout, Template
from ..taps import Halt, Tap, tapping, until_halted
from .base import CausalModule, PoolOver
from .causal import check_one_copy


class EarlyExitModule(CausalModule):
    """Base of the modules whose papers read the residual stream at 27 of 32 layers.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        template: Has one copy.
        pool_over: As for :class:`CausalModule`.
        output_layer: As for :class:`CausalModule`; None: 27 of 32 layers, in proportion. -1: all.
        final_norm: Whether the states that are read go through the model's final norm. False: they are those of the
            residual stream, transformers' ``hidden_states[output_layer]``, of which only those of the very last layer
            come with the norm.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: As :class:`CausalModule` does.
    """

    config_keys = [*CausalModule.config_keys, "template", "final_norm"]

    #: The share of a model's layers that is run where ``output_layer`` is None.
    SHARE = 27 / 32

    def __init__(
        self,
        model_name_or_path: str | Transformer,
        *,
        template: Template,
        pool_over: PoolOver,
        output_layer: int | None,
        final_norm: bool,
        **transformer_kwargs: Any,
    ) -> None:
        if not isinstance(final_norm, bool):
            raise ValueError(f"final_norm={final_norm!r}: use True or False.")
        parsed = check_one_copy(template, type(self))
        super().__init__(
            model_name_or_path, template=parsed, pool_over=pool_over, output_layer=output_layer, **transformer_kwargs
        )
        self.template = str(parsed)
        self.final_norm = final_norm
        self._top = max(self._layer_places().paths)

    def _usual_output_layer(self) -> int:
        return max(1, round(self.SHARE * backbone.depth(self.model)))

    @property
    def cost(self) -> str:
        return "One pass over the text, up to the output layer: no more than the classical embedding."

    def _hidden_states(self, layout: Layout, read: Tensor | None = None, **kwargs: Any) -> Tensor:
        self._refuse_checkpointing()
        if self.final_norm:
            return super()._hidden_states(layout, read, **kwargs)
        found: list[Tensor] = []

        def take(states: Tensor) -> Tensor:
            found.append(states)
            raise Halt

        with until_halted(), tapping({self._layer_places().at(self.model, self._top): Tap(after=take)}):
            super()._hidden_states(layout, read, **kwargs)
        return beside(found[0].to(layout.input_ids.device))
