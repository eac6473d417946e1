"""A language model that ends below its last layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from transformers import PreTrainedModel

from ...lm.view import resolve_layer
from .change import Change


@dataclass(frozen=True)
class EarlyExit(Change):
    """The layers above one of them are not run, and not saved; the final norm is.

    A module makes it first of all: what other changes say about layers is about those that are run.

    Attributes:
        output_layer: After which layer to stop, counted from 1, or from the top if negative (-2: the last but one).
    """

    output_layer: int
    key: ClassVar[str] = "early-exit"
    looks_ahead: ClassVar[bool] = False

    def resolved(self, model: PreTrainedModel, whole_depth: int) -> Self:
        return type(self)(resolve_layer(model, self.output_layer))
