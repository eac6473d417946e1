"""Kept vectors behind each filter, fitted on a few hundred texts of the training part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from st_reba.modules import CausalModule, EmbeddingFilter
from st_reba.modules.moments import Moments
from st_reba.recipes import every_row
from st_reba.recipes.rows import IDF, PARTS

from .texts import FIT_TEXTS
from .vectors import Vectors

Array = NDArray[np.float32]

#: Nothing first; then that of the language model's head, and those that are fitted on vectors.
FILTERS = ("", *(name for name in PARTS if name != IDF))

#: What is never without its filter.
NEVER_WITHOUT = {row.name: row for row in every_row() if row.around is not None}

#: Which list's vectors filters are fitted on, for each list.
_FIT = {
    "stsb-en-dev": "fit-en", "stsb-en-test": "fit-en", "stsb-zh-dev": "fit-zh", "stsb-zh-test": "fit-zh",
    "tnews-train": "tnews-train", "tnews-test": "tnews-train", "thucnews-titles": "tnews-train",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One way to read a model.

    Attributes:
        recipe: Its name.
        pooling: ``"mean"``, ``"last"``, or empty where words are read.
        layer: After which layer; None for the recipe's own end.
        filter: One of :data:`FILTERS`.
    """

    recipe: str
    pooling: str
    layer: int | None = None
    filter: str = ""


@dataclass(frozen=True)
class Source:
    """Where the vectors of a recipe and a pooling lie: which pass, under which name, with how many layers."""

    run: str
    name: str
    layers: int

    def own_end(self) -> int | None:
        """The layer that is the recipe's own."""
        return self.layers - 1 if self.layers else None


class Kept:
    """All vectors of one model.

    Args:
        directory: Below which they lie, ``list/pass/``.
        head: The filter of the language model's head; None leaves it out.
        backbone: What a recipe is built on, to see how much each part of its vectors counts.
    """

    def __init__(
        self, directory: Path, head: EmbeddingFilter | None = None, backbone: CausalModule | None = None
    ) -> None:
        self.directory = directory
        self.head = head
        self.backbone = backbone

    def sources(self, lists: Sequence[str]) -> dict[tuple[str, str], Source]:
        """By recipe and pooling, those that all of these lists have."""
        found: list[dict[tuple[str, str], Source]] = []
        for name in lists:
            own: dict[tuple[str, str], Source] = {}
            for directory in sorted((self.directory / name).glob("*")):
                kept = Vectors(directory)
                if not kept.done:
                    continue
                for variant in kept.variants():
                    recipe, comma, pooling = variant.rpartition(", ")
                    key = (recipe, pooling) if comma and pooling in ("mean", "last") else (variant, "")
                    source = Source(directory.name, variant, kept.layers(variant))
                    # A pass that reads every layer says more.
                    if key not in own or own[key].layers < source.layers:
                        own[key] = source
            found.append(own)
        return {key: source for key, source in found[0].items() if all(key in own for own in found)} if found else {}

    def vectors(self, name: str, source: Source, layer: int | None) -> Array:
        """(texts, D), of one list."""
        return Vectors(self.directory / name / source.run).read(source.name, layer)

    def filtered(
        self, lists: Sequence[str], source: Source, layer: int | None, filters: Sequence[str] = FILTERS
    ) -> Iterator[tuple[str, list[Array]]]:
        """The vectors of some lists that share a fit, behind each filter."""
        own = [self.vectors(name, source, layer) for name in lists]
        moments: Moments | None = None
        row = NEVER_WITHOUT.get(source.name.rpartition(", ")[0])
        shares = CausalModule.shares
        if row is not None and row.around is not None:
            filters = (row.around.name,)
            shares = row.module.shares if self.backbone is None else row.build(self.backbone).shares
        for name in filters:
            if not name:
                yield name, own
                continue
            if not PARTS[name].fitted:
                if self.head is not None:
                    yield name, [_mapped(self.head, each) for each in own]
                continue
            if moments is None:
                fit_list = _FIT[lists[0]]
                fit = own[lists.index(fit_list)] if fit_list in lists else self.vectors(fit_list, source, layer)
                moments = Moments(fit.shape[1])
                moments.add(torch.from_numpy(fit[:FIT_TEXTS]))
            try:
                module = PARTS[name].from_moments(moments, shares)
            except ValueError:
                # Vectors that do not vary, such as a prompt's last state before the first layer.
                continue
            yield name, [_mapped(module, each) for each in own]


@torch.inference_mode()
def _mapped(module: nn.Module, vectors: Array) -> Array:
    return module({"sentence_embedding": torch.from_numpy(vectors)})["sentence_embedding"].numpy()
