"""KV re-routing: the last token's key and value stand before all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from transformers import PreTrainedModel

from ...lm import backbone
from ...lm.attention import routes
from ...lm.attention.changes import FirstKey
from ...lm.run import PassChange
from ...text.layout import Layout
from .change import Change, Fitted


@dataclass(frozen=True)
class Reroute(Change):
    r"""In some layers, the key and value of the layout's last token stand before all others, for every token to see.

    .. math:: \tilde K = [k_n; K], \quad \tilde V = [v_n; V]

    (Tang and Yang, "KV-Embedding".) What attention goes to it there is not part of the weights that an observer sees:
    these are of the tokens where they stand.

    Attributes:
        layers: The indices of the layers; negative ones from the top. None: the middle third.
        prefix_bias: Added to the logit of the key that stands before all others.
    """

    layers: Sequence[int] | None = None
    prefix_bias: float = 0.0
    key: ClassVar[str] = "reroute"
    replaces: ClassVar[Literal["first key"]] = "first key"

    def __post_init__(self) -> None:
        bias = self.prefix_bias
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not math.isfinite(bias):
            raise ValueError(f"prefix_bias={bias!r}: give a finite number; 0 changes no logit.")
        object.__setattr__(self, "prefix_bias", float(bias))
        if isinstance(self.layers, Sequence) and not isinstance(self.layers, str):
            object.__setattr__(self, "layers", tuple(self.layers))

    def resolved(self, model: PreTrainedModel, whole_depth: int) -> Self:
        return replace(self, layers=_resolved(self.layers, backbone.depth(model)))

    def fitted(self, model: PreTrainedModel) -> Fitted:
        assert self.layers is not None
        routes.make_rerouted(model, self.layers)
        return _Rerouted(self.layers, self.prefix_bias)


class _Rerouted(Fitted):
    def __init__(self, layers: Sequence[int], bias: float) -> None:
        super().__init__()
        self.layers = layers
        self.bias = bias

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        return PassChange(rerouting=FirstKey(self.layers, layout.ends, self.bias))


def middle_third(depth: int) -> range:
    """The layers that are neither among the first nor among the last third."""
    return range(depth // 3, depth - depth // 3)


def _resolved(layers: Sequence[int] | None, depth: int) -> tuple[int, ...]:
    if layers is None:
        return tuple(middle_third(depth))
    listed = layers if isinstance(layers, tuple) else ()
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in listed)
    if not listed or not whole or not all(-depth <= layer < depth for layer in listed):
        given = list(layers) if isinstance(layers, tuple) else layers
        raise ValueError(
            f"layers={given!r}: the model has {depth} layers; give a list of one or more of their indices, {-depth} "
            f"to {depth - 1}, or None for the middle third."
        )
    return tuple(sorted({layer % depth for layer in listed}))
