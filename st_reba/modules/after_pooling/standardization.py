"""Centring and standardised dimensions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sentence_transformers import SentenceTransformer
from torch import Tensor

from .moments import Moments, embedding_moments
from .transform import ROUNDING, EmbeddingTransform, check_that_they_vary

if TYPE_CHECKING:
    from typing_extensions import Self


class _Fitted(EmbeddingTransform):
    """What is fitted on moments without any choice."""

    @classmethod
    def fit(cls, model: SentenceTransformer, texts: Iterable[str], **kwargs: Any) -> Self:
        """Fit on the embeddings that a model gives texts, however many: they are never held together.

        Args:
            model: What the module will stand behind, whole: ``SentenceTransformer(modules=[*model, module])``.
            texts: Any iterable of strings; no labels are needed. Two that differ are enough, some hundreds are better.
            **kwargs: For :func:`~.moments.embedding_moments`: ``chunk_size``, ``batch_size``, ``prompt_name`` ...

        Raises:
            ValueError: If the texts are too few or too much alike.
        """
        return cls.from_moments(embedding_moments(model, texts, **kwargs))

    @classmethod
    def from_moments(cls, moments: Moments) -> Self:
        """Fit on the mean and covariance of embeddings.

        Args:
            moments: Of embeddings (D,).

        Raises:
            ValueError: As for :meth:`fit`.
        """
        raise NotImplementedError


class Centering(_Fitted):
    r"""Takes the mean of a collection's embeddings from each embedding.

    .. math:: e' = e - \mu

    The cosine of two texts is then that of what is their own: what all texts have in common is gone. The dimension
    stays D.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).

    Raises:
        ValueError: If ``mean`` is no vector.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        if mean.ndim != 1 or not len(mean):
            raise ValueError(f"mean is {tuple(mean.shape)}: give (D,).")
        self.in_features = self.out_features = len(mean)
        self._keep(mean=mean)

    @classmethod
    def from_moments(cls, moments: Moments) -> Self:
        check_that_they_vary(moments)
        return cls(moments.mean)

    def _transform(self, embedding: Tensor) -> Tensor:
        return embedding - self.mean.to(embedding.dtype)


class Standardization(_Fitted):
    r"""Gives each dimension mean 0 and standard deviation 1 over a collection of texts.

    .. math:: e'_j = (e_j - \mu_j) / \sigma_j

    A language model's states have a few dimensions that dwarf all others, and with them every cosine (Timkey and van
    Schijndel, 2021, arXiv 2109.04404). The dimension stays D. A dimension in which the collection does not vary is
    only centred.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).
        deviation: (D,), above 0.

    Raises:
        ValueError: If the shapes do not fit each other, or a deviation is not above 0.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        if mean.ndim != 1 or not len(mean) or mean.shape != deviation.shape:
            raise ValueError(f"mean is {tuple(mean.shape)} and deviation {tuple(deviation.shape)}: give (D,) for both.")
        self.in_features = self.out_features = len(mean)
        self._keep(mean=mean, deviation=deviation)
        if not (self.deviation > 0).all():
            raise ValueError("A deviation is 0 or below: embeddings are divided by them, so give what is above 0.")

    @classmethod
    def from_moments(cls, moments: Moments) -> Self:
        check_that_they_vary(moments)
        deviation = moments.covariance.diagonal().sqrt()
        constant = deviation <= ROUNDING * moments.mean.abs()
        return cls(moments.mean, deviation.masked_fill(constant, 1.0))

    def _transform(self, embedding: Tensor) -> Tensor:
        return (embedding - self.mean.to(embedding.dtype)) / self.deviation.to(embedding.dtype)
