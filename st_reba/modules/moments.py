"""Mean and covariance, or variances, of vectors that come by and by; the principal directions of a symmetric matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor


class Moments:
    """Mean and covariance of any number of vectors, or their variances alone, in float64, without keeping them.

    Batches are merged by the update of Chan, Golub and LeVeque (1983), which never subtracts large sums from each
    other: the result is that of all vectors at once, whatever the batches.

    Attributes:
        count: n, how many vectors there were.
        mean: (D,), float64.
        scatter: (D, D), float64, the sum of (x - mean)(x - mean)^T; of variances alone its diagonal, (D,).

    Args:
        dimension: D.
        covariance: Whether the covariance is kept. Variances alone take D numbers, where it takes D * D.
    """

    def __init__(self, dimension: int, *, covariance: bool = True) -> None:
        self.count = 0
        self.mean = torch.zeros(dimension, dtype=torch.float64)
        self.scatter = torch.zeros((dimension, dimension) if covariance else dimension, dtype=torch.float64)

    def add(self, vectors: Tensor) -> None:
        """Take a batch in.

        Args:
            vectors: (B, D), of any precision, on any device. The sums move to the device of each batch.

        Raises:
            ValueError: If they have another D, or a value is not finite.
        """
        if vectors.ndim != 2 or vectors.shape[1] != len(self.mean):
            raise ValueError(f"The vectors are {tuple(vectors.shape)}: give (B, {len(self.mean)}), as before.")
        # Apple's devices have no float64.
        vectors = vectors.detach().to("cpu" if vectors.device.type == "mps" else vectors.device, torch.float64)
        if not vectors.isfinite().all():
            raise ValueError(
                "An embedding has a value that is infinite or not a number, so there is no covariance. In float16 "
                "large activations overflow: load the model in bfloat16 or float32."
            )
        if len(vectors):
            batch = Moments(0)
            batch.count, batch.mean = len(vectors), vectors.mean(dim=0)
            centred = vectors - batch.mean
            batch.scatter = self._scattered(centred)
            self.merge(batch)

    def merge(self, other: Moments) -> None:
        """Take in what other moments (of the same D) have taken in, from another process for instance."""
        if not other.count:
            return
        total = self.count + other.count
        mean, scatter = self.mean.to(other.mean.device), self.scatter.to(other.mean.device)
        apart = other.mean - mean
        self.scatter = scatter + other.scatter + self._scattered(apart[None]) * (self.count * other.count / total)
        self.mean = mean + apart * (other.count / total)
        self.count = total

    def _scattered(self, centred: Tensor) -> Tensor:
        """What vectors (B, D) add to the scatter."""
        return centred.square().sum(dim=0) if self.scatter.ndim == 1 else centred.mT @ centred

    @property
    def covariance(self) -> Tensor:
        """(D, D), float64: the scatter over n, as in the papers."""
        return self.scatter / max(1, self.count)

    @property
    def variances(self) -> Tensor:
        """(D,), float64: those of each dimension."""
        return (self.scatter if self.scatter.ndim == 1 else self.scatter.diagonal()) / max(1, self.count)


def embedding_moments(
    model: SentenceTransformer,
    texts: Iterable[str],
    *,
    chunk_size: int = 1024,
    covariance: bool = True,
    **encode_kwargs: Any,
) -> Moments:
    """Mean and covariance of the embeddings that a model gives texts, a chunk of them in memory at a time.

    Texts without tokens, which are embedded as zero vectors, do not count.

    Args:
        model: Embeds as always, its ``truncate_dim`` apart: the moments are those of whole embeddings.
        texts: Any iterable of strings, a generator over a file for instance; read once.
        chunk_size: How many texts are encoded at a time; sorted by length among themselves, as ``encode`` does.
        covariance: As for :class:`Moments`.
        **encode_kwargs: For ``model.encode``: ``batch_size``, ``prompt_name`` and so on.

    Raises:
        ValueError: If ``texts`` is a string or has none, or ``chunk_size`` is below 1, or an embedding is not finite.
    """
    settings = {"show_progress_bar": False, **encode_kwargs, "convert_to_tensor": True}
    moments: Moments | None = None
    with model.truncate_embeddings(None):
        for chunk in in_chunks(texts, chunk_size):
            embeddings = model.encode(chunk, **settings)
            moments = moments or Moments(embeddings.shape[1], covariance=covariance)
            moments.add(embeddings[embeddings.any(dim=1)])
    if moments is None:
        raise ValueError("No texts were given: their embeddings' mean and covariance are what is fitted.")
    return moments


def in_chunks(texts: Iterable[str], chunk_size: int) -> Iterator[list[str]]:
    """Lists of ``chunk_size`` texts, the last one shorter.

    Raises:
        ValueError: If ``texts`` is a string, or ``chunk_size`` is below 1.
    """
    if isinstance(texts, str):
        raise ValueError("texts is one string: give an iterable of texts, such as a list or a generator.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: give how many texts are read at a time, 1 or more.")
    remaining = iter(texts)
    while chunk := list(islice(remaining, chunk_size)):
        yield chunk


def principal_directions(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, falling, and eigenvectors of a symmetric matrix.

    Args:
        symmetric: (D, D).

    Returns:
        (D,), and (D, D) with a direction in each row. Of a direction and its opposite, which are one to the matrix, it
        is that whose largest value is positive, so that two machines give the same.
    """
    values, columns = torch.linalg.eigh(symmetric)
    rows = columns.mT.flip(0)
    largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
    return values.flip(0), rows * largest.sign()
