"""Kept vectors of a model, as they are and behind each filter, fitted on a few hundred texts of the training part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from runs import kept
from st_reba.modules import CausalModule, EmbeddingFilter
from st_reba.modules.moments import Moments
from st_reba.recipes import every_row
from st_reba.recipes.rows import IDF, PARTS

from .passes import Run
from .sets import FIT_TEXTS, Sets, TextList

Array = NDArray[np.float32]

#: Texts that are run together, and texts of a file.
BATCH, BLOCK = 32, 512

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


def embed(directory: Path, run: Run, texts_of: TextList, sets: Sets) -> None:
    """Keep what one pass makes of one list: a file for each block of texts, so that a run that was stopped goes on.

    A file has the vectors of each variant, of each layer where it has several; which texts of the list these are; and
    how many texts the list has.
    """
    texts = texts_of.read(sets)
    words = texts_of.words(sets).inputs()[1] if texts_of.words else None
    order = np.argsort([-len(text) for text in texts], kind="stable")

    def embedded(rows: NDArray[np.int64]) -> dict[str, Any]:
        found: dict[str, list[Array]] = defaultdict(list)
        with torch.inference_mode():
            for batch in np.split(rows, range(BATCH, len(rows), BATCH)):
                own = None if words is None else [words[row] for row in batch]
                for variant, vectors in run([texts[row] for row in batch], own).items():
                    layers = {"": vectors} if vectors.ndim == 2 else dict(enumerate(vectors.unbind(1)))
                    for layer, each in layers.items():
                        found[f"{variant}/{layer}"].append(each.float().cpu().numpy())
        return {**{name: np.concatenate(several) for name, several in found.items()}, "rows": rows, "texts": len(texts)}

    for number, first in enumerate(range(0, len(texts), BLOCK)):
        kept(directory / f"{number:04}.npz", partial(embedded, order[first : first + BLOCK]))


@cache
def blocks(directory: Path) -> list[Any]:
    """What :func:`embed` kept; nothing where it was stopped."""
    found = [np.load(file) for file in sorted(directory.glob("*.npz"))]
    return found if found and sum(len(block["rows"]) for block in found) == found[0]["texts"] else []


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
                layers: dict[str, int] = defaultdict(int)
                for member in blocks(directory)[0].files if blocks(directory) else ():
                    if "/" in member:
                        variant, _, layer = member.rpartition("/")
                        layers[variant] += layer != ""
                for variant, count in layers.items():
                    recipe, comma, pooling = variant.rpartition(", ")
                    key = (recipe, pooling) if comma and pooling in ("mean", "last") else (variant, "")
                    # A pass that reads every layer says more.
                    if key not in own or own[key].layers < count:
                        own[key] = Source(directory.name, variant, count)
            found.append(own)
        return {key: source for key, source in found[0].items() if all(key in own for own in found)} if found else {}

    def vectors(self, name: str, source: Source, layer: int | None) -> Array:
        """(texts, D), of one list."""
        member = f"{source.name}/{'' if layer is None else layer}"
        own = [(block["rows"], block[member]) for block in blocks(self.directory / name / source.run)]
        rows, vectors = (np.concatenate(parts) for parts in zip(*own, strict=True))
        return np.asarray(vectors[np.argsort(rows)])

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
