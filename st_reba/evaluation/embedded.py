"""Embeddings of texts by several variants of one model: each text is embedded once, and looked up from then on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from ..files import atomic_file, remove_scratch
from ..fingerprint import fingerprint_of

#: Function from B texts and their prompt (or None) to ``{variant: (B, D)}``. Variants may differ in D.
Embed = Callable[[Sequence[str], str | None], Mapping[str, Tensor]]


class TensorCache:
    """Tensors in files, each named by a digest of all that it was computed from, so that none is computed twice.

    A file is written wholly or not at all, so that a killed run, when resumed, gives the same result.
    Files are mapped: the operating system keeps them in memory as far as there is room.

    Args:
        directory: Directory of the files; it is made if there is none. None: a temporary one, removed with the cache.
    """

    def __init__(self, directory: Path | None = None) -> None:
        if directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="st-reba-")
            directory = Path(self._temporary.name)
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_scratch(self.directory)

    def get(self, computed_from: Any, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return tensors by name, computed if there is no file of them.

        Args:
            computed_from: All that they depend on, as JSON or ``str`` can write it.
            compute: Computes them.

        Raises:
            OSError: If the disk is full.
        """
        path = self.directory / f"{fingerprint_of(computed_from)}.safetensors"
        if path.is_file():
            try:
                return load_file(path)
            except SafetensorError:
                path.unlink()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in compute().items()}
        with atomic_file(path) as stream:
            stream.write(save(tensors))
        return load_file(path)


class Embedded:
    """Embeddings of texts in every variant, from the one time each text was embedded.

    Args:
        embed: Embeds texts; called once for each text behind its prompt. For large corpora it should return tensors
            that are mapped from files, as :class:`TensorCache` does.
        chunk: Number of texts at a time, at most; neighbours in length, the longest first, so that little is padding.
            None: all that are asked for together.
    """

    def __init__(self, embed: Embed, chunk: int | None = None) -> None:
        self.embed = embed
        self.chunk = chunk
        self._chunks: list[Mapping[str, Tensor]] = []
        self._places: dict[tuple[str | None, str], tuple[int, int]] = {}

    def has(self, texts: Sequence[str], prompt: str | None = None) -> bool:
        """Return whether all texts have been embedded."""
        return all((prompt, text) in self._places for text in texts)

    def add(self, texts: Sequence[str], prompt: str | None = None) -> None:
        """Embed the texts that have not been embedded yet, in all variants."""
        missing = [text for text in dict.fromkeys(texts) if (prompt, text) not in self._places]
        missing.sort(key=len, reverse=True)
        size = self.chunk or max(1, len(missing))
        for start in range(0, len(missing), size):
            part = missing[start : start + size]
            self._chunks.append(self.embed(part, prompt))
            self._places.update({(prompt, text): (len(self._chunks) - 1, row) for row, text in enumerate(part)})

    def of(self, variant: str, texts: Sequence[str], prompt: str | None = None) -> Tensor:
        """Return the embeddings of B texts in one variant, (B, D), on the CPU. Texts that are missing are embedded.

        Raises:
            KeyError: If ``embed`` does not return this variant.
        """
        self.add(texts, prompt)
        chunks, rows = torch.tensor([self._places[prompt, text] for text in texts]).T
        first = self._chunks[0][variant]
        embeddings = first.new_empty(len(texts), *first.shape[1:])
        order = chunks.argsort()
        numbers, counts = chunks[order].unique_consecutive(return_counts=True)
        for number, places in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
            embeddings[places] = self._chunks[number][variant][rows[places]]
        return embeddings


class Lookup(nn.Module):
    """Module that looks embeddings up, in place of a whole pipeline in one variant.

    Args:
        embedded: The embeddings.
        variant: Name of the variant.
    """

    modalities = ("text",)

    def __init__(self, embedded: Embedded, variant: str) -> None:
        super().__init__()
        self.embedded = embedded
        self.variant = variant

    def preprocess(self, texts: Sequence[str], prompt: str | None = None, task: str | None = None) -> dict[str, Any]:
        """Return the texts as features. ``task`` is an argument of ST's."""
        return {"texts": texts, "prompt": prompt or None}

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {"sentence_embedding": self.embedded.of(self.variant, features["texts"], features["prompt"])}


def stand_in(embedded: Embedded, variant: str, like: Any = None) -> SentenceTransformer:
    """Return a model that encodes with ST's own code (prompts, truncation, quantisation ...) and looks embeddings up.

    Args:
        embedded: The embeddings.
        variant: Name of the variant.
        like: A ``SentenceTransformer`` whose prompts, similarity and truncation are used; ST's defaults if None.
    """
    names = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim")
    settings = {} if like is None else {name: getattr(like, name) for name in names}
    return SentenceTransformer(modules=[Lookup(embedded, variant)], device="cpu", **settings)
