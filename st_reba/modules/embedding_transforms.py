"""Maps of sentence embeddings, which stand after ``Pooling``: their base, and those fitted on mean and covariance."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import linear

from ..settings import optional, whole
from .moments import Moments, embedding_moments, principal_directions
from .stored import FixedWeights
from .token_vectors import ONE_BY_ONE

#: Deviations below this share of a dimension's mean are rounding of the embeddings.
ROUNDING = 10 * torch.finfo(torch.float32).eps

#: What whitening adds to each direction's variance by default, as a share of their mean.
SHRINKAGE = 0.1


class EmbeddingTransform(FixedWeights):
    """Base of the modules that map ``sentence_embedding`` (B, D) to (B, k), after ``Pooling`` and before ``Normalize``.

    The weights are buffers: they are saved and move with the model, gradients pass through them, and training leaves
    them as they are. A zero vector, which is how a text without tokens is embedded, stays one.
    """

    #: Which of the features is mapped.
    MAPPED: ClassVar[str] = "sentence_embedding"

    SIZES = ("in_features", "out_features")
    config_keys: list[str] = [*SIZES]

    in_features: int
    out_features: int

    def _transform(self, embedding: Tensor) -> Tensor:
        """The map: (B, D) to (B, k), float32 or float64."""
        raise NotImplementedError

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Map each vector.

        Args:
            features: With the vectors (..., D) that the module maps: ``sentence_embedding``, as a rule.
            **kwargs: Not used.

        Returns:
            The features with these vectors as (..., k), in the precision that they had.

        Raises:
            ValueError: If the vectors have another D than the weights.
        """
        vectors: Tensor = features[self.MAPPED]
        if vectors.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__} maps embeddings of {self.in_features} values and was given "
                f"{vectors.shape[-1]}: put it right behind the modules that it was made for."
            )
        wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        mapped = self._one_by_one(wide) if features.get(ONE_BY_ONE) else self._transform(wide)
        empty = ~vectors.any(dim=-1, keepdim=True)
        return {**features, self.MAPPED: mapped.masked_fill(empty, 0).to(vectors.dtype)}

    def _one_by_one(self, vectors: Tensor) -> Tensor:
        """The same map. How a matrix product rounds depends on how many rows it has: here each vector has its own."""
        mapped = [self._transform(vector) for vector in vectors.flatten(0, -2).split(1)]
        return torch.cat(mapped).unflatten(0, vectors.shape[:-1])

    def get_embedding_dimension(self) -> int:
        """k."""
        return self.out_features


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
        if mean.ndim != 1 or not len(mean):
            raise ValueError(f"mean is {tuple(mean.shape)}: give (D,).")
        super().__init__(mean=mean)
        self.in_features = self.out_features = len(mean)

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
        if mean.ndim != 1 or not len(mean) or mean.shape != deviation.shape:
            raise ValueError(f"mean is {tuple(mean.shape)} and deviation {tuple(deviation.shape)}: give (D,) for both.")
        super().__init__(mean=mean, deviation=deviation)
        self.in_features = self.out_features = len(mean)
        if not (self.deviation > 0).all():
            raise ValueError("A deviation is 0 or below: embeddings are divided by them, so give what is above 0.")

    @classmethod
    def from_moments(cls, moments: Moments) -> Self:
        check_that_they_vary(moments)
        deviation = moments.variances.sqrt()
        constant = deviation <= ROUNDING * moments.mean.abs()
        return cls(moments.mean, deviation.masked_fill(constant, 1.0))

    def _transform(self, embedding: Tensor) -> Tensor:
        return (embedding - self.mean.to(embedding.dtype)) / self.deviation.to(embedding.dtype)


class WhiteningTransform(EmbeddingTransform):
    r"""Makes the embeddings of a collection of texts uncorrelated, with mean 0 and nearly one variance everywhere.

    .. math::
        e' = (e - \mu) W, \qquad W = \bigl(U (\Lambda + \varepsilon \bar\lambda I)^{-1/2}\bigr)_{[:, :k]}, \qquad
        \Sigma = U \Lambda U^\top

    with mean :math:`\mu` and covariance :math:`\Sigma` of the texts' embeddings, and the mean :math:`\bar\lambda` of
    its eigenvalues. With :math:`\varepsilon = 0` that is Su et al. (2021, arXiv 2103.15316). A covariance that is
    estimated on few texts has directions of far too little variance, which plain whitening blows up; the shrinkage
    :math:`\varepsilon` bounds by how much (towards a multiple of the identity, as in Ledoit and Wolf, 2004).
    Directions stand in the order of falling variance, so that ``truncate_dim=n`` gives what ``dimension=n`` does.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).
        weight: (k, D), the transpose of W.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    mean: Tensor
    weight: Tensor

    def __init__(self, mean: Tensor, weight: Tensor) -> None:
        check_rows(mean, weight, "weight", fewest=1)
        super().__init__(mean=mean, weight=weight)
        self.out_features, self.in_features = weight.shape

    @classmethod
    def fit(
        cls,
        model: SentenceTransformer,
        texts: Iterable[str],
        *,
        dimension: int | None = None,
        shrinkage: float = SHRINKAGE,
        **kwargs: Any,
    ) -> WhiteningTransform:
        r"""Fit on the embeddings that a model gives texts, however many: they are never held together.

        Args:
            model: What the module will stand behind, whole: ``SentenceTransformer(modules=[*model, whitening])``.
            texts: Any iterable of strings; no labels are needed. Two that differ are enough, some hundreds are better.
            dimension: k, the directions to keep, those of largest variance. If None, all D; without shrinkage D - 1
                where the embeddings vary in no more: a backbone that ends in a LayerNorm (GPT-2, OPT) takes one away.
            shrinkage: :math:`\varepsilon`, 0 or more: what is added to each direction's variance, as a share of their
                mean. With 0 every direction gets variance 1 over these texts, and these have to be more than
                ``dimension``.
            **kwargs: For :func:`~.moments.embedding_moments`: ``chunk_size``, ``batch_size``, ``prompt_name`` ...

        Raises:
            ValueError: If ``dimension`` or ``shrinkage`` is out of range, or the texts are too few or too much alike.
        """
        check_shrinkage(shrinkage, SHRINKAGE, plain=True)
        moments = embedding_moments(model, texts, **kwargs)
        return cls.from_moments(moments, dimension=dimension, shrinkage=shrinkage)

    @classmethod
    def from_moments(
        cls, moments: Moments, *, dimension: int | None = None, shrinkage: float = SHRINKAGE
    ) -> WhiteningTransform:
        """Fit on the mean and covariance of embeddings.

        Args:
            moments: Of embeddings (D,).
            dimension: As for :meth:`fit`.
            shrinkage: As for :meth:`fit`.

        Raises:
            ValueError: As for :meth:`fit`.
        """
        size = len(moments.mean)
        check_count("dimension", dimension, 1, size, "the directions to keep")
        check_shrinkage(shrinkage, SHRINKAGE, plain=True)
        check_that_they_vary(moments)
        variances, directions = principal_directions(moments.covariance)
        kept = _kept(moments.count, variances, dimension) if shrinkage == 0 else dimension or size
        # Where there is none, rounding makes a variance slightly negative.
        variances = variances.clamp(min=0)
        scales = (variances + shrinkage * variances.mean()).sqrt()
        return cls(moments.mean, directions[:kept] / scales[:kept, None])

    def _transform(self, embedding: Tensor) -> Tensor:
        return linear(embedding - self.mean.to(embedding.dtype), self.weight.to(embedding.dtype))


def _kept(count: int, variances: Tensor, dimension: int | None) -> int:
    """How many directions plain whitening keeps: it divides by their variance, so there has to be some."""
    kept = len(variances) if dimension is None else dimension
    # What is below this is rounding of the embeddings, not variance.
    noise = variances[0] * len(variances) * torch.finfo(torch.float32).eps ** 2
    rank = int((variances > noise).sum())
    if dimension is None and rank == len(variances) - 1 and count > kept:
        return rank
    if rank < kept or count <= kept:
        raise ValueError(
            f"The embeddings of these {count} texts vary in {rank} directions only, so {kept} cannot be whitened "
            f"without shrinkage: give more than {kept} varied texts, or set shrinkage above 0, or give a lower "
            "dimension."
        )
    return kept


class AllButTheTop(EmbeddingTransform):
    r"""Takes from each embedding the mean of a collection's, and its part in their d principal directions.

    .. math:: e' = \tilde{e} - \sum_{i=1}^{d} (u_i^\top \tilde{e}) \, u_i, \qquad \tilde{e} = e - \mu

    (Mu & Viswanath, 2018, arXiv 1702.01417.) The dimension stays D.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).
        directions: (k, D), orthonormal rows; k = d may be 0.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    mean: Tensor
    directions: Tensor

    def __init__(self, mean: Tensor, directions: Tensor) -> None:
        check_rows(mean, directions, "directions", fewest=0)
        super().__init__(mean=mean, directions=directions)
        self.in_features = self.out_features = len(mean)

    @classmethod
    def fit(
        cls, model: SentenceTransformer, texts: Iterable[str], *, removed: int | None = None, **kwargs: Any
    ) -> AllButTheTop:
        """Fit on the embeddings that a model gives texts, however many: they are never held together.

        Args:
            model: What the module will stand behind, whole: ``SentenceTransformer(modules=[*model, module])``.
            texts: Any iterable of strings; no labels are needed. At least ``removed`` + 2, and better some thousands.
            removed: d, the directions to remove; D / 100, and at least 1, if None. 0 takes the mean away alone.
            **kwargs: For :func:`~.moments.embedding_moments`: ``chunk_size``, ``batch_size``, ``prompt_name`` ...

        Raises:
            ValueError: If ``removed`` is out of range, or the texts are too few.
        """
        return cls.from_moments(embedding_moments(model, texts, **kwargs), removed=removed)

    @classmethod
    def from_moments(cls, moments: Moments, *, removed: int | None = None) -> AllButTheTop:
        """Fit on the mean and covariance of embeddings.

        Args:
            moments: Of embeddings (D,).
            removed: As for :meth:`fit`.

        Raises:
            ValueError: As for :meth:`fit`.
        """
        size = len(moments.mean)
        check_count("removed", removed, 0, size - 1, "the principal directions to remove")
        count = max(1, size // 100) if removed is None else removed
        # With d + 1 texts nothing would be left of any of them.
        if moments.count < count + 2:
            raise ValueError(
                f"{moments.count} texts are too few to find {count} principal directions to remove: give at least "
                f"{count + 2}, and better some thousands."
            )
        _, directions = principal_directions(moments.covariance)
        return cls(moments.mean, directions[:count])

    def _transform(self, embedding: Tensor) -> Tensor:
        centred = embedding - self.mean.to(embedding.dtype)
        directions = self.directions.to(embedding.dtype)
        return centred - (centred @ directions.mT) @ directions


def check_rows(mean: Tensor, rows: Tensor, name: str, *, fewest: int) -> None:
    """Refuse a mean that is not (D,), or rows that are not (k, D): k is ``fewest``, 0 or 1, to ``fewest`` + D - 1."""
    if rows.ndim != 2 or not fewest <= len(rows) < rows.shape[1] + fewest or mean.shape != rows.shape[1:]:
        raise ValueError(
            f"mean is {tuple(mean.shape)} and {name} {tuple(rows.shape)}: give (D,) and (k, D) with k from "
            f"{'1 to D' if fewest else '0 to D - 1'}."
        )


def check_count(name: str, value: int | None, least: int, most: int, what: str) -> None:
    """Refuse what is not a whole number in a range, or None."""
    optional(whole(name, least, most, f"give {what}, a whole number from {least} to {most}.")).check(value)


def check_shrinkage(value: float, usual: float, *, plain: bool) -> None:
    """Refuse what cannot be added to the variance of each direction.

    Args:
        value: As a share of the mean variance.
        usual: For the message.
        plain: Whether 0 is allowed, which is plain whitening.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (0 < value < math.inf or (plain and value == 0)):
        allowed, ending = ("a number, 0 or more", ", and 0 is plain whitening") if plain else ("a number above 0", "")
        raise ValueError(
            f"shrinkage={value!r}: give {allowed}: what is added to the variance of each direction, as a share of "
            f"their mean. {usual:g} is usual{ending}."
        )


def check_that_they_vary(moments: Moments) -> None:
    """Refuse embeddings that are all one, to rounding, or none at all: nothing can be fitted on them."""
    rounding = torch.finfo(torch.float32).eps * moments.mean.norm()
    if moments.count < 2 or moments.variances.sum() <= rounding**2:
        raise ValueError(
            f"{moments.count} texts were given, and their embeddings do not differ: give two texts or more that do, "
            "and better some hundreds."
        )
