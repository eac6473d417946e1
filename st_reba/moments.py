"""Streaming mean and covariance of vectors, and principal directions of a symmetric matrix."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from tqdm import tqdm

#: Seconds between two states of a progress bar in a log.
LOG_SECONDS = 10.0
#: Number of texts that are encoded, and sorted by length, at a time.
CHUNK = 1024


class Moments:
    """Mean and covariance of any number of vectors, or their mean and variances, in float64.

    Batches are merged by the update of Chan, Golub and LeVeque (1983), which never subtracts large sums from each
    other. The result is that of all vectors at once, however they are divided into batches.

    Attributes:
        count: Number of vectors, n.
        mean: (D,), float64.
        scatter: (D, D), float64, the sum of (x - mean)(x - mean)^T; of variances alone its diagonal, (D,).

    Args:
        dimension: D.
        covariance: Whether the covariance is computed. Variances alone take D numbers instead of D * D.
    """

    def __init__(self, dimension: int, *, covariance: bool = True) -> None:
        self.count = 0
        self.mean = torch.zeros(dimension, dtype=torch.float64)
        self.scatter = torch.zeros((dimension, dimension) if covariance else dimension, dtype=torch.float64)

    def add(self, vectors: Tensor) -> None:
        """Add a batch.

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
            problem = "An embedding has a value that is infinite or not a number, so there is no covariance."
            raise ValueError(f"{problem} In float16 large activations overflow: load the model in bfloat16 or float32.")
        if not len(vectors):
            return
        total, batch_mean = self.count + len(vectors), vectors.mean(dim=0)
        mean, scatter = self.mean.to(vectors.device), self.scatter.to(vectors.device)
        difference = batch_mean - mean
        between = self._scatter_of(difference[None]) * (self.count * len(vectors) / total)
        self.scatter = scatter + self._scatter_of(vectors - batch_mean) + between
        self.mean = mean + difference * (len(vectors) / total)
        self.count = total

    def _scatter_of(self, centred: Tensor) -> Tensor:
        """Return the scatter of vectors (B, D) whose mean is 0."""
        return centred.square().sum(dim=0) if self.scatter.ndim == 1 else centred.mT @ centred

    @property
    def covariance(self) -> Tensor:
        """Scatter over n, (D, D), float64."""
        return self.scatter / max(1, self.count)

    @property
    def variances(self) -> Tensor:
        """Variance of each dimension, (D,), float64."""
        return (self.scatter if self.scatter.ndim == 1 else self.scatter.diagonal()) / max(1, self.count)


def embedding_moments(
    model: SentenceTransformer, texts: Iterable[str], *, covariance: bool = True, **encode_kwargs: Any
) -> Moments:
    """Compute mean and covariance of the embeddings of texts, with one chunk of them in memory at a time.

    Texts without tokens, which are embedded as zero vectors, do not count.

    Args:
        model: Model that embeds the texts. Its ``truncate_dim`` does not apply.
        texts: Strings, for instance a generator over the lines of a file. They are read once.
        covariance: As for :class:`Moments`.
        **encode_kwargs: Arguments of ``model.encode``, such as ``batch_size`` and ``prompt_name``.

    Raises:
        ValueError: If ``texts`` is a string or empty, or an embedding is not finite.
    """
    settings = {"show_progress_bar": False, **encode_kwargs, "convert_to_tensor": True}
    moments: Moments | None = None
    with model.truncate_embeddings(None):
        for chunk in in_chunks(texts):
            embeddings = model.encode(chunk, **settings)
            moments = moments or Moments(embeddings.shape[1], covariance=covariance)
            moments.add(embeddings[embeddings.any(dim=1)])
    if moments is None:
        raise ValueError("No texts were given: their embeddings' mean and covariance are what is fitted.")
    return moments


def in_chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of :data:`CHUNK` texts; the last one may be shorter.

    Raises:
        ValueError: If ``texts`` is a string.
    """
    if isinstance(texts, str):
        raise ValueError("texts is one string: give an iterable of texts, such as a list or a generator.")
    remaining = iter(texts)
    while chunk := list(islice(remaining, CHUNK)):
        yield chunk


def principal_directions(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues in falling order, and eigenvectors.

    Args:
        symmetric: (D, D).

    Returns:
        (D,), and (D, D) with a direction in each row. The largest value of each direction is positive, so that two
        machines give the same.
    """
    values, columns = torch.linalg.eigh(symmetric)
    rows = columns.mT.flip(0)
    largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
    return values.flip(0), rows * largest.sign()


@contextmanager
def fitting_progress(module: nn.Module, texts: int | None) -> Iterator[None]:
    """Show the progress of fitting on texts, by the batches of a model's first module."""

    def update(_module: nn.Module, _args: Any, features: dict[str, Any]) -> None:
        bar.update(len(features["token_embeddings"]))

    seconds = 0.25 if sys.stderr.isatty() else LOG_SECONDS
    with tqdm(desc="Fitting", total=texts, unit=" texts", leave=False, delay=seconds, mininterval=seconds) as bar:
        hook = module.register_forward_hook(update)
        try:
            yield
        finally:
            hook.remove()
