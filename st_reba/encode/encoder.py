"""What turns texts into vectors: a model by name and ``encode``'s own settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from torch import Tensor

from ..data.rows import check_characters
from ..hub.push import ENCODERS, saved_class
from ..reading.chunks import check_chunk_tokens, encode_chunks
from .model_files import saved_commit

Precision = Literal["float32", "binary", "ubinary"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Pieces:
    """Vectors of texts, or of their chunks.

    Attributes:
        vectors: (chunks, values); or, of a text that has a list of them, Parquet's columns by name.
        texts: (chunks,), which of the texts each is cut from.
        spans: (chunks, 2), its characters there: the first, and one past the last; zeros where texts are not cut.
    """

    vectors: np.ndarray | dict[str, pa.Array]
    texts: np.ndarray
    spans: np.ndarray


def sparse_columns(weights: Tensor) -> dict[str, pa.Array]:
    """The weights of texts, sparse (texts, vocabulary), as lists: ``indices`` of the vocabulary, ascending, and
    ``values``."""
    weights = weights.cpu().coalesce()
    counts = weights.values() != 0
    texts, places = weights.indices()[:, counts]
    ends = pa.array([0, *texts.bincount(minlength=len(weights)).cumsum(0).tolist()], type=pa.int32())
    values = {"indices": places.int().numpy(), "values": weights.values()[counts].float().numpy()}
    return {name: pa.ListArray.from_arrays(ends, pa.array(each)) for name, each in values.items()}


def token_columns(rows: Sequence[Any]) -> dict[str, pa.Array]:
    """The vectors of each text's tokens, (tokens, values) a text, as one column of lists, ``vectors``."""
    ends = pa.array(np.cumsum([0, *map(len, rows)]), type=pa.int32())
    every = torch.cat([torch.as_tensor(row) for row in rows]).float().cpu().contiguous().numpy()
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(every.reshape(-1)), every.shape[1])
    return {"vectors": pa.ListArray.from_arrays(ends, vectors)}


@dataclass(frozen=True)
class Encoder:
    """A model and how it is used. Plain data, for worker processes; each loads the model itself.

    Args:
        model: A saved SentenceTransformer: a directory, or a Hub id. A bare language model, such as a GGUF file, is
            none.
        revision: Branch, tag or commit of a Hub id.
        dtype: Weights' precision, ``"auto"`` for the model's own.
        batch_size: Texts at a time.
        prompt_name: One of the model's prompts, by name.
        prompt: A prompt in full; not beside ``prompt_name``.
        truncate_dim: Keep this many of a vector's first values; the model's own setting if None.
        normalize: Scale vectors to length 1, after truncation.
        chunk_tokens: A vector for each chunk of so many tokens, which knows its text: see
            :func:`~st_reba.encode_chunks`. None: one for each text.
        chunk_overlap: How many tokens a chunk shares with the next one.

    Raises:
        ValueError: If a setting cannot hold.
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    batch_size: int = 32
    prompt_name: str | None = None
    prompt: str | None = None
    truncate_dim: int | None = None
    normalize: bool = False
    chunk_tokens: int | None = None
    chunk_overlap: int = 0

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None:
            check_chunk_tokens(self.chunk_tokens, self.chunk_overlap)
        elif self.chunk_overlap:
            raise ValueError(f"chunk_overlap={self.chunk_overlap}: it is between chunks; give chunk_tokens, too.")
        for name, value in (("batch_size", self.batch_size), ("truncate_dim", self.truncate_dim)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give a whole number from 1.")
        if self.prompt is not None and self.prompt_name is not None:
            raise ValueError("Give a prompt in full or by its name, not both.")
        if self.prompt is not None:
            check_characters(self.prompt, "The prompt")

    def pinned(self) -> Encoder:
        """The same with an absolute path, or with the commit that a revision stands for at this moment.

        Raises:
            ValueError: If there is no such directory and no such model, or it is no saved SentenceTransformer.
        """
        commit = saved_commit(self.model, self.revision)
        model = self.model if commit else str(Path(self.model).absolute())
        return replace(self, model=model, revision=commit)

    def load(self, device: str) -> SentenceTransformer:
        """The model, on a device.

        Raises:
            ValueError: If it has no prompt of that name.
        """
        kind = ENCODERS[saved_class(self.model, self.revision) or "SentenceTransformer"]
        model: SentenceTransformer = kind(
            self.model, revision=self.revision, device=device, model_kwargs={"dtype": self.dtype}
        )
        if self.prompt_name is not None and self.prompt_name not in model.prompts:
            names = ", ".join(f'"{name}"' for name in model.prompts) or "none"
            raise ValueError(f'prompt_name="{self.prompt_name}": the model has {names}. Or give the prompt in full.')
        return model

    def encode(
        self, model: SentenceTransformer, texts: list[str], on_texts: Callable[[int], None] = lambda texts: None
    ) -> np.ndarray | dict[str, pa.Array]:
        """``(len(texts), values)``, float32 or the model's own precision; of sparse models and of those that give each
        token a vector, columns of lists. These read texts as documents; under the prompt's name ``query``, as queries.

        Args:
            model: From :meth:`load`.
            texts: What is encoded.
            on_texts: Called after each batch with how many texts more have been read.

        Raises:
            ValueError: If the vectors are shorter than ``truncate_dim``.
        """
        left = len(texts)

        def told(*_: object) -> None:
            nonlocal left
            done = min(self.batch_size, left)
            left -= done
            on_texts(done)

        # sentence-transformers has a progress bar for that, and no callback.
        hook = model[0].register_forward_hook(told)
        try:
            if isinstance(model, SentenceTransformer):
                return self._checked(model.encode(texts, show_progress_bar=False, **self._settings))
            read = model.encode_query if self.prompt_name == "query" else model.encode_document
            found: Any = read(
                texts, prompt_name=self.prompt_name, prompt=self.prompt, batch_size=self.batch_size,
                show_progress_bar=False,
            )  # fmt: skip
        finally:
            hook.remove()
        return sparse_columns(found) if isinstance(model, SparseEncoder) else token_columns(found)

    def pieces(self, model: SentenceTransformer, texts: list[str], on_texts: Callable[[int], None]) -> Pieces:
        """The vectors of texts or, with ``chunk_tokens``, of their chunks; arguments as for :meth:`encode`.

        Raises:
            ValueError: As :meth:`encode`, or if the model has no vectors of tokens to make chunks of.
        """
        if self.chunk_tokens is None:
            vectors = self.encode(model, texts, on_texts)
            return Pieces(vectors, np.arange(len(texts)), np.zeros((len(texts), 2), np.int64))
        told = 0

        def on_windows(done: int, total: int) -> None:
            nonlocal told
            more = len(texts) * done // total - told
            told += more
            on_texts(more)

        found = encode_chunks(
            model, texts, chunk_tokens=self.chunk_tokens, overlap=self.chunk_overlap, on_windows=on_windows,
            **self._settings,
        )  # fmt: skip
        return Pieces(
            self._checked(np.concatenate([each.vectors for each in found])),
            np.repeat(np.arange(len(found)), [len(each.spans) for each in found]),
            np.array([span for each in found for span in each.spans], dtype=np.int64).reshape(-1, 2),
        )

    @property
    def _settings(self) -> dict[str, Any]:
        """What both ways to encode take."""
        return {
            "prompt_name": self.prompt_name,
            "prompt": self.prompt,
            "batch_size": self.batch_size,
            "normalize_embeddings": self.normalize,
            "truncate_dim": self.truncate_dim,
        }

    def _checked(self, vectors: np.ndarray) -> np.ndarray:
        if self.truncate_dim is not None and vectors.shape[1] < self.truncate_dim:
            raise ValueError(f"truncate_dim={self.truncate_dim}: the model's vectors have {vectors.shape[1]} values.")
        return vectors
