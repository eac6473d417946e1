"""Echo embeddings of several layers."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import nn

from ..lm import backbone
from ..lm.anatomy import final_norm, layer_paths
from ..lm.run import recording
from ..text.layout import Layout
from .echo import EchoModule
from .token_vectors import TokenVectors


class EchoLayersModule(EchoModule):
    r"""Word i is a weighted mean of its states behind the last m layers, in the last copy; later layers count more.

    .. math:: e_i = \frac{2}{m (m + 1)} \sum_{l=1}^{m} l \, v^{(L-m+l)}_{(k-1)n+i}

    with the final norm on the states of every layer.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        last_layers: m, from 1 to the number of layers.
        **transformer_kwargs: As for :class:`EchoModule`.

    Raises:
        ValueError: If m is out of range, or as :class:`EchoModule` does.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*EchoModule.config_keys, "last_layers"]
    reads_hidden_states = False
    method = "Echo over layers"
    equation = r"e_i = \frac{2}{m (m + 1)} \sum_{l=1}^{m} l \, v^{(L-m+l)}_{(k-1)n+i}"

    def __init__(
        self, model_name_or_path: str | Transformer, *, last_layers: int = 2, **transformer_kwargs: Any
    ) -> None:
        super().__init__(model_name_or_path, **transformer_kwargs)
        layers = backbone.depth(self.model)
        if type(last_layers) is not int or not 1 <= last_layers <= layers:
            raise ValueError(f"last_layers={last_layers!r}: the model runs {layers} layers; give 1 to {layers}.")
        self.last_layers = last_layers
        self._every_norm = final_norm(self.model) if self.final_norm else nn.Identity()

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        with recording(self.model, layer_paths(self.model), self._every_norm) as record:
            reading = super()._read(layout, **kwargs)
        layers = torch.stack(record.split(reading.states)[-self.last_layers :], dim=-1)
        places = torch.arange(1, self.last_layers + 1).to(layers)
        return reading._replace(states=layers @ places / places.sum())
