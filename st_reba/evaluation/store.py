"""Several readings of one model, each as a model of its own: a text is embedded once, and looked up from then on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from ..files import is_full

#: Embeds B texts with a prompt (or None) in every variant at once: ``{variant: (B, D)}``. Variants may differ in D.
Embed = Callable[[Sequence[str], str | None], Mapping[str, Tensor]]


class EmbeddingStore:
    """The embeddings of texts in every variant, from the one time each text was embedded.

    They lie in files, one for each variant, which the operating system keeps in memory as far as there is room: a
    corpus of a million texts needs n x D numbers a variant on the disk, and not in memory. The files are gone with the
    store; it is a context manager.

    Args:
        embed: Is asked once for each pair of prompt and text, a batch at a time.
        batch_size: Texts of a batch, at most; neighbours in length, the longest first, so that little is padding. None:
            all that are asked for together.
        on_texts: Called with the number of texts whenever some have been embedded.
        directory: Where the files may lie; the system's directory for temporary files if None.
    """

    def __init__(
        self,
        embed: Embed,
        *,
        batch_size: int | None = None,
        on_texts: Callable[[int], None] = lambda texts: None,
        directory: str | Path | None = None,
    ) -> None:
        self.embed = embed
        self.batch_size = batch_size
        self.on_texts = on_texts
        self._directory = tempfile.TemporaryDirectory(dir=directory, prefix="st-reba-")
        self._rows: dict[tuple[str | None, str], int] = {}
        self._files: dict[str, _Rows] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __enter__(self) -> EmbeddingStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._directory.cleanup()

    def add(self, texts: Sequence[str], prompt: str | None = None) -> None:
        """Embed those of the texts that have not been embedded yet, in all variants."""
        keys = [(prompt, text) for text in texts]
        if missing := [key for key in dict.fromkeys(keys) if key not in self._rows]:
            missing.sort(key=lambda key: -len(key[1]))
            size = self.batch_size or len(missing)
            for start in range(0, len(missing), size):
                self._add(missing[start : start + size])

    def look_up(self, variant: str, texts: Sequence[str], prompt: str | None = None) -> Tensor:
        """The embeddings of B texts in one variant, (B, D), on the CPU; those that were not added are first.

        Raises:
            KeyError: If ``embed`` does not give this variant.
        """
        self.add(texts, prompt)
        if variant not in self._files:
            raise KeyError(f"There is no variant {variant!r}; there are {sorted(self._files)}.")
        return self._files[variant].read([self._rows[prompt, text] for text in texts])

    def forget(self) -> None:
        """Drop every embedding: the texts that come now are others."""
        self._rows.clear()
        for rows in self._files.values():
            rows.path.unlink()
        self._files.clear()

    def _add(self, keys: list[tuple[str | None, str]]) -> None:
        """Embed texts that share a prompt, and note their rows when all of them are stored."""
        prompt = keys[0][0]
        for variant, embeddings in self.embed([text for _, text in keys], prompt).items():
            if variant not in self._files:
                path = Path(self._directory.name) / f"{len(self._files)}.bin"
                self._files[variant] = _Rows(path, embeddings.shape[1], embeddings.dtype)
            try:
                self._files[variant].write(len(self._rows), embeddings)
            except OSError as error:
                if not is_full(error):
                    raise
                raise OSError(
                    f"{self._directory.name}: the disk is full. Embeddings lie there while they are scored: make room, "
                    "or set TMPDIR to a directory with more."
                ) from error
        self._rows.update({key: row for row, key in enumerate(keys, start=len(self._rows))})
        self.on_texts(len(keys))


class _Rows:
    """Rows of one width and type in a file: bytes, so that every type of torch's fits."""

    def __init__(self, path: Path, width: int, dtype: torch.dtype) -> None:
        self.path = path
        self.dtype = dtype
        self.row_bytes = width * dtype.itemsize
        path.touch()

    def write(self, start: int, rows: Tensor) -> None:
        with self.path.open("r+b") as file:
            file.seek(start * self.row_bytes)
            file.write(rows.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())

    def read(self, indices: list[int]) -> Tensor:
        rows = np.memmap(self.path, dtype=np.uint8, mode="r").reshape(-1, self.row_bytes)
        return torch.from_numpy(rows[indices]).view(self.dtype)


class Lookup(nn.Module):
    """Stands for a whole pipeline in one variant: gives a text's embedding out of a store.

    Args:
        store: Knows the embeddings.
        variant: Which of them to give.
    """

    modalities = ("text",)

    def __init__(self, store: EmbeddingStore, variant: str) -> None:
        super().__init__()
        self.store = store
        self.variant = variant

    def preprocess(self, texts: Sequence[str], prompt: str | None = None, task: str | None = None) -> dict[str, Any]:
        """Nothing yet: which texts have to be tokenised at all, the store will know. ``task`` is ST's, as elsewhere."""
        return {"texts": texts, "prompt": prompt or None}

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        embeddings = self.store.look_up(self.variant, features["texts"], features["prompt"])
        return {"sentence_embedding": embeddings}


def stand_in(
    store: EmbeddingStore, variant: str, like: Any = None, *, prompts: Mapping[str, str] | None = None
) -> SentenceTransformer:
    """A model that encodes with ST's own code (prompts, truncation, quantisation ...) and looks embeddings up.

    Args:
        store: Knows the embeddings.
        variant: Which of them to give.
        like: A ``SentenceTransformer`` whose prompts, similarity and truncation it takes over; ST's defaults if None.
        prompts: Others in place of its prompts.
    """
    settings = {} if like is None else adopted_settings(like)
    if prompts is not None:
        settings["prompts"] = dict(prompts)
    return SentenceTransformer(modules=[Lookup(store, variant)], device="cpu", **settings)


def adopted_settings(like: Any) -> dict[str, Any]:
    """What a stand-in takes over from a ``SentenceTransformer``, by name."""
    return {name: getattr(like, name) for name in _SETTINGS}


_SETTINGS = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim")
