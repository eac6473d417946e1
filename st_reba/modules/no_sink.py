"""Both ways, no sink: the upper layers attend both ways, and in the last of them no token sees the first one."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, cast

from torch import nn

from .causal_transformer import CausalTransformer
from .changes import NoSink


class NoSinkModule(CausalTransformer):
    r"""The upper half of the layers attends both ways, and the upper half of these hides the first token.

    .. math:: A_{j1} = 0, \quad j > 1

    (Lin et al., MASK0&BIDIR; the numbers of layers are this package's choice.) Most heads leave their attention at the
    first token of the whole input, the sink: a special token, or the first of a prompt or of the text. Where it is
    hidden, it attends to itself, and the other weights of each token sum to 1. Padding stays hidden.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        layers: Indices of the layers that hide the first token; negative ones from the top. None: the upper half of
            those that attend both ways.
        bidirectional_layers: Number of last layers that attend both ways, 1 or more. None: half of all.
        **transformer_kwargs: All else as for :class:`CausalTransformer`.

    Raises:
        ValueError: If a setting is out of range, or the attention of these layers cannot be changed, or the model is
            not causal.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalTransformer.config_keys, "layers"]
    method = "Both ways, no sink"
    equation = r"e_i = v_i, \quad \text{the upper layers without the causal mask, in the last of which } A_{j1} = 0"
    citation = (
        "Ziyong Lin, Haoyi Wu, Shu Wang, Kewei Tu, Zilong Zheng, Zixia Jia: Look Both Ways and No Sink: Converting "
        "LLMs into Text Encoders without Training. ACL 2025."
    )

    def __init__(
        self,
        model_name_or_path: str | PathLike[str] | nn.Module,
        *,
        layers: Sequence[int] | None = None,
        bidirectional_layers: int | None = None,
        **transformer_kwargs: Any,
    ) -> None:
        self.changes = [NoSink(layers, bidirectional_layers)]
        super().__init__(model_name_or_path, **transformer_kwargs)
        made = self.change(NoSink)
        self.layers = [*cast("tuple[int, ...]", made.layers)]
        self.bidirectional_layers = cast(int, made.bidirectional_layers)
