"""Free parts of a recipe: the layer it is read at, the words its prompt ends in, and the weights of its parts.

Each combination is a candidate.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..evaluation.layers import reads_one_layer
from ..modules import TopicModule
from ..recipes import Recipe, find
from ..recipes.rows import CLASSICAL

# Share of the layers after which a recipe is read besides its own end and the layer below.
_NINE_TENTHS = 0.9


def classical(pooling: str) -> Recipe:
    """Return the classical embedding under a pooling: it needs no recipe, and its time is the unit of cost."""
    return replace(find("classical"), pooling=pooling)


def with_candidates(recipe: Recipe, depth: int) -> list[Recipe]:
    """Return a recipe as it is, and every other combination of layer, wording and weights of its parts.

    The classical embedding stays as it is, and so does a recipe that was asked for at a layer. A recipe whose last
    layers attend both ways is read at its own end alone, as each other layer would take a pass of its own.

    Args:
        recipe: The recipe.
        depth: Number of layers of the model.
    """
    row = recipe.row
    if recipe.layer is not None or "bidirectional_layers" in row.settings or row is CLASSICAL:
        return [recipe]
    layers: list[int | None] = [None]
    if reads_one_layer(row.module) or row.module is TopicModule:
        end = depth + 1 + row.end
        below = dict.fromkeys((end - 1, round(_NINE_TENTHS * depth)))
        layers += [layer for layer in below if 0 < layer < end]
    return [
        replace(recipe, layer=layer, wording=wording, part_weights=weights, candidate_of=recipe.result)
        for layer in layers
        for wording in (None, *row.wordings)
        for weights in ((), *_part_weights(row.parts))
    ]


def _part_weights(parts: int) -> list[tuple[float, ...]]:
    """Return a coarse grid of weights of P parts: each in turn counts twice as much as each of the others."""
    weights = np.ones((parts, parts)) + np.eye(parts)
    return [tuple((own / own.sum()).tolist()) for own in weights] if parts > 1 else []


def in_short(recipe: Recipe) -> str:
    """Return how a candidate differs from its recipe as it is, for a column of a table; empty if it does not."""
    layer = "" if recipe.layer is None else f"@{recipe.layer}"
    wording = "" if recipe.wording is None else recipe.wording.name
    # The part that counts twice.
    part = f"part {1 + int(np.argmax(recipe.part_weights))} twice" if recipe.part_weights else ""
    return " ".join(filter(None, (layer, wording, part)))
