"""What the methods share that read one copy under a prompt, after a layer below the last."""

from __future__ import annotations

from typing import Any, ClassVar

from sentence_transformers.base.modules import Transformer

from ..text.layout import Layout
from ..text.templates import Template
from .base import CausalModule, PoolOver
from .causal_transformer import check_one_copy
from .readout import Reading


class EarlyExitModule(CausalModule):
    """Base of the modules whose papers read the residual stream, as it is, at 27 of 32 layers.

    Args:
        model_name_or_path: As for :class:`CausalModule`.
        template: Has one copy.
        **transformer_kwargs: As for :class:`CausalModule`. ``pool_over=None`` is ``"all"``; ``output_layer=None`` is as
            the template's name says, else 27 of 32 layers, in proportion; ``final_norm=None`` is False.

    Raises:
        ValueError: As :class:`CausalModule` does.
    """

    config_keys = [*CausalModule.config_keys, "template"]
    POOL_OVER: ClassVar[PoolOver] = "all"
    FINAL_NORM: ClassVar[bool] = False

    SHARE: ClassVar[float | None] = 27 / 32

    def __init__(self, model_name_or_path: str | Transformer, *, template: Template, **transformer_kwargs: Any) -> None:
        super().__init__(model_name_or_path, template=check_one_copy(template, type(self)), **transformer_kwargs)
        self.template = str(template)

    @property
    def cost(self) -> str:
        return "One pass over the text, up to the output layer: no more than the classical embedding."

    def _read(self, layout: Layout, **kwargs: Any) -> Reading:
        return self._read_tokens(layout, **kwargs)
