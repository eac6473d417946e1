"""Vectors that were computed once: half-precision numbers in files, each with its own scale."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from st_reba.files import atomic_file

# The largest number of half precision, with room to spare.
_LARGEST = 60000.0


class Vectors:
    """What one pass made of one list of texts, by variant, in a directory.

    The list of variants is written last: a run that was stopped does again what has none.

    Args:
        directory: Where.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, np.memmap] = {}

    @property
    def done(self) -> bool:
        return self._index.is_file()

    @property
    def _index(self) -> Path:
        return self.directory / "index.json"

    def put(self, texts: int, rows: Sequence[int], found: Mapping[str, NDArray[np.float32]]) -> None:
        """Take in what a batch gave, by variant, each (B, D) or (B, layers, D).

        Args:
            texts: How many texts the list has.
            rows: Where in the list those of the batch stand.
            found: By variant.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for variant, vectors in found.items():
            if variant not in self._open:
                path = self.directory / f".{len(self._open)}.bin"
                shape = (texts, *vectors.shape[1:])
                # Not in memory: all layers of a few thousand texts are gigabytes.
                self._open[variant] = np.memmap(path, dtype=np.float32, mode="w+", shape=shape)
            self._open[variant][rows] = vectors

    def finish(self, notes: Mapping[str, object]) -> None:
        """All texts are there: keep them."""
        variants = {}
        for number, (variant, vectors) in enumerate(self._open.items()):
            # A scale for each layer: early ones are small, and late ones of some models beyond half precision.
            axes = (0, vectors.ndim - 1)
            scale = np.maximum(vectors.max(axis=axes, keepdims=True), -vectors.min(axis=axes, keepdims=True)) / _LARGEST
            scale[scale == 0] = 1
            name = f"{number}.npy"
            kept = np.lib.format.open_memmap(self.directory / name, mode="w+", dtype=np.float16, shape=vectors.shape)
            for start in range(0, len(vectors), 256):
                kept[start : start + 256] = vectors[start : start + 256] / scale
            kept.flush()
            variants[variant] = {"file": name, "scale": np.squeeze(scale, axis=axes).tolist()}
            Path(str(vectors.filename)).unlink()
        self._open.clear()
        with atomic_file(self._index, "w") as file:
            json.dump({"variants": variants, **notes}, file, indent=1)

    def variants(self) -> list[str]:
        return list(json.loads(self._index.read_text(encoding="utf-8"))["variants"])

    def read(self, variant: str, layer: int | None = None) -> NDArray[np.float32]:
        """(texts, D): a variant, of one of its layers where it has them."""
        entry = json.loads(self._index.read_text(encoding="utf-8"))["variants"][variant]
        kept = np.load(self.directory / entry["file"], mmap_mode="r")
        if layer is None:
            return kept.astype(np.float32) * np.float32(entry["scale"])
        return kept[:, layer].astype(np.float32) * np.float32(entry["scale"][layer])

    def layers(self, variant: str) -> int:
        """How many layers a variant has, the input embeddings included; 0 if it was read at one alone."""
        entry = json.loads(self._index.read_text(encoding="utf-8"))["variants"][variant]
        return len(entry["scale"]) if isinstance(entry["scale"], list) else 0
