"""What a search tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...catalogue import PARTS, Recipe, Row, every_row, find
from ...modules.after_pooling.choices import FILTERS
from ...readers.layers import reads_one_layer
from ...text.templates import preset


@dataclass(frozen=True)
class Candidate:
    """One combination.

    Attributes:
        row: How the model is run.
        layer: After which layer it is read; None for the recipe's own end.
        pooling: How token vectors become one.
        filter: What stands behind that, one of :data:`~st_reba.modules.after_pooling.choices.FILTERS`; empty for none.
    """

    row: Row
    layer: int | None
    pooling: str
    filter: str = ""

    @property
    def run(self) -> tuple[str, int | None]:
        """What candidates have in common that come out of one pass."""
        return self.row.key, None if reads_one_layer(self.row.module) else self.layer

    def recipe(self, fit_texts: Sequence[str]) -> Recipe:
        """The candidate as a recipe, its filter fitted on these texts."""
        part = PARTS[self.filter] if self.filter else None
        return Recipe(self.row, self.pooling, tuple(fit_texts), part, self.layer)


#: The recipe without any choice: what a search has to beat.
PLAIN = Candidate(find("classical").row, None, "mean")


def searched() -> list[Row]:
    """Every way to run the model that a search tries."""
    return [row for row in every_row() if row.searched]


def poolings(row: Row) -> tuple[str, ...]:
    """Those under which it is not another recipe."""
    return tuple(pooling for pooling in row.poolings if pooling != "last" or not row.same_if_last)


def end(row: Row) -> int:
    """The layer that it ends with, from the top: -1 the last, -2 the last but one."""
    return preset(row.settings.get("template", "{text}")).output_layer or -1


def candidates(layers: int, every: Sequence[Row] | None = None) -> list[Candidate]:
    """Every combination, on a model of so many layers.

    It is read after each eighth of the layers from a quarter of them on, after the last but one, and at its end: the
    turning points that papers report lie there.
    """
    chosen = sorted({round(layers * eighth / 8) for eighth in range(2, 8)} | {layers - 1})
    return [
        Candidate(row, layer, pooling, name)
        for row in (searched() if every is None else every)
        for layer in [*(layer for layer in chosen if 0 < layer < layers + 1 + end(row)), None]
        for pooling in poolings(row)
        for name in ("", *FILTERS)
    ]
