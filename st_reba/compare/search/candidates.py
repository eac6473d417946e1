"""What a search tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...reading.layers import reads_one_layer
from ...recipes import Recipe, Row, every_row, find
from ...recipes.lookup import changed
from ...recipes.rows import FILTERS, PARTS
from ...text.templates import preset


@dataclass(frozen=True)
class Candidate:
    """One combination.

    Attributes:
        row: How the model is run, and under which change.
        layer: After which layer it is read; None for the recipe's own end.
        pooling: How token vectors become one.
        filter: What stands behind that, one of :data:`~st_reba.recipes.rows.FILTERS`; empty for none.
    """

    row: Row
    layer: int | None
    pooling: str
    filter: str = ""

    @property
    def run(self) -> tuple[str, int | None]:
        """What candidates have in common that come out of one pass."""
        return self.row.key, None if gives_every_layer(self.row) else self.layer

    def recipe(self, fit_texts: Sequence[str]) -> Recipe:
        """The candidate as a recipe, its filter fitted on these texts."""
        part = PARTS[self.filter] if self.filter else None
        return Recipe(self.row, self.pooling, tuple(fit_texts), part, self.layer)


def gives_every_layer(row: Row) -> bool:
    """Whether one pass gives what is read after each layer; a change is one of the model that ends there."""
    return reads_one_layer(row.module) and not row.unchanged


#: The recipe without any choice: what a search has to beat.
PLAIN = Candidate(find("classical").row, None, "mean")


def searched() -> list[Row]:
    """Every way to run the model that a search tries: rows as they are, and each under each change."""
    plain = [row for row in every_row() if row.searched]
    return [*plain, *(each for row in plain for each in changed(row))]


def end(row: Row) -> int:
    """The layer that it ends with, from the top: -1 the last, -2 the last but one."""
    return int(preset(row.settings.get("template", "{text}")).output_layer or -1)


def candidates(layers: int, every: Sequence[Row] | None = None) -> list[Candidate]:
    """Every combination, on a model of so many layers.

    It is read after each eighth of the layers from a quarter of them on, after the last but one, and at its end: the
    turning points that papers report lie there. A row under a change is read at its end alone, as any other layer would
    take a pass of its own.
    """
    chosen = sorted({round(layers * eighth / 8) for eighth in range(2, 8)} | {layers - 1})
    return [
        Candidate(row, layer, pooling, name)
        for row in (searched() if every is None else every)
        for layer in [*(layer for layer in chosen if 0 < layer < layers + 1 + end(row) and not row.unchanged), None]
        for pooling in row.own_poolings
        for name in ("", *FILTERS)
    ]
