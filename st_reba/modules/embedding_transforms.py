"""Maps of sentence embeddings, placed after ``Pooling``: their base, and those fitted on mean and covariance."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import linear

from ..moments import Moments, embedding_moments, principal_directions
from ..settings import check, check_int
from .stored import FixedWeights
from .vectors import ONE_BY_ONE

#: A deviation below this share of a dimension's mean is rounding error of the embeddings.
ROUNDING = 10 * torch.finfo(torch.float32).eps

#: Default of the variance that whitening adds to each direction, as a share of the mean variance.
SHRINKAGE = 0.1


class EmbeddingTransform(FixedWeights):
    """Base of modules that map ``sentence_embedding`` (B, D) to (B, k), after ``Pooling`` and before ``Normalize``.

    A zero vector, the embedding of a text without tokens, remains one.
    """

    #: Feature that is mapped.
    MAPPED: ClassVar[str] = "sentence_embedding"

    SIZES = ("in_features", "out_features")
    config_keys: list[str] = [*SIZES]

    def __init__(self, **weights: Tensor) -> None:
        super().__init__(**weights)
        self.in_features = self.dimensions["D"]
        self.out_features = self.dimensions.get("k", self.in_features)

    def _transform(self, embedding: Tensor) -> Tensor:
        """Map (B, D) to (B, k), float32 or float64."""
        raise NotImplementedError

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Map each vector.

        Args:
            features: With the vectors, (..., D), under :attr:`MAPPED`.
            **kwargs: Ignored.

        Returns:
            The features with the mapped vectors, (..., k), in the precision of the given ones.

        Raises:
            ValueError: If D is not that of the weights.
        """
        vectors: Tensor = features[self.MAPPED]
        if vectors.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__} maps embeddings of {self.in_features} values and was given "
                f"{vectors.shape[-1]}: put it right behind the modules that it was made for."
            )
        wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        mapped = self._one_by_one(wide) if features.get(ONE_BY_ONE) else self._transform(wide)
        is_empty = ~vectors.any(dim=-1, keepdim=True)
        return {**features, self.MAPPED: mapped.masked_fill(is_empty, 0).to(vectors.dtype)}

    def _one_by_one(self, vectors: Tensor) -> Tensor:
        """Map each vector alone: the rounding of a matrix product depends on its number of rows."""
        mapped = [self._transform(vector) for vector in vectors.flatten(0, -2).split(1)]
        return torch.cat(mapped).unflatten(0, vectors.shape[:-1])

    def get_embedding_dimension(self) -> int:
        """Return k."""
        return self.out_features


class FittedTransform(EmbeddingTransform):
    """Base of maps that are fitted on the embeddings of plain texts."""

    #: Whether the fit needs the covariance; without it, mean and variances.
    NEEDS_COVARIANCE: ClassVar[bool] = True
    #: Arguments of :meth:`from_moments` in addition to the moments.
    FIT_SETTINGS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def fit(cls, model: SentenceTransformer, texts: Iterable[str], **kwargs: Any) -> Self:
        """Fit on the embeddings that a model gives texts. They are never in memory together.

        Args:
            model: The whole model that precedes the new module: ``SentenceTransformer(modules=[*model, module])``.
            texts: Strings; no labels are needed. Two that differ are enough, some hundreds are better.
            **kwargs: Settings of :meth:`from_moments`, and arguments of :func:`~.moments.embedding_moments`, such as
                ``chunk_size``, ``batch_size`` and ``prompt_name``.

        Raises:
            ValueError: If a setting is out of range, or the texts are too few or too similar.
        """
        settings = {name: kwargs.pop(name) for name in cls.FIT_SETTINGS if name in kwargs}
        moments = embedding_moments(model, texts, covariance=cls.NEEDS_COVARIANCE, **kwargs)
        return cls.from_moments(moments, **settings)

    @classmethod
    def from_moments(cls, moments: Moments, *args: Any, **settings: Any) -> Self:
        """Fit on mean and covariance of embeddings.

        Args:
            moments: Moments of embeddings (D,).
            *args: None.
            **settings: Settings of the class.

        Raises:
            ValueError: As for :meth:`fit`.
        """
        raise NotImplementedError


class Centering(FittedTransform):
    r"""Subtracts the mean embedding of a collection of texts.

    .. math:: e' = e - \mu

    The cosine of two texts then ignores what all texts have in common.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).

    Raises:
        ValueError: If ``mean`` is not a vector.
    """

    SHAPES = {"mean": "D"}
    NEEDS_COVARIANCE = False

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__(mean=mean)

    @classmethod
    def from_moments(cls, moments: Moments) -> Self:
        check_that_they_vary(moments)
        return cls(moments.mean)

    def _transform(self, embedding: Tensor) -> Tensor:
        return embedding - self.mean.to(embedding.dtype)


class Standardization(FittedTransform):
    r"""Gives each dimension mean 0 and standard deviation 1 over a collection of texts.

    .. math:: e'_j = (e_j - \mu_j) / \sigma_j

    Hidden states of language models have a few dimensions that dominate all others, and with them every cosine (Timkey
    and van Schijndel, 2021, arXiv 2109.04404). A dimension that does not vary over the collection is only centred.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).
        deviation: (D,), above 0.

    Raises:
        ValueError: If the shapes do not fit each other, or a deviation is not above 0.
    """

    SHAPES = {"mean": "D", "deviation": "D"}
    NEEDS_COVARIANCE = False

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__(mean=mean, deviation=deviation)
        if not (self.deviation > 0).all():
            raise ValueError("A deviation is 0 or below: embeddings are divided by them, so give what is above 0.")

    @classmethod
    def from_moments(cls, moments: Moments) -> Self:
        check_that_they_vary(moments)
        deviation = moments.variances.sqrt()
        is_constant = deviation <= ROUNDING * moments.mean.abs()
        return cls(moments.mean, deviation.masked_fill(is_constant, 1.0))

    def _transform(self, embedding: Tensor) -> Tensor:
        return (embedding - self.mean.to(embedding.dtype)) / self.deviation.to(embedding.dtype)


class WhiteningTransform(FittedTransform):
    r"""Makes the embeddings of a collection of texts uncorrelated, with mean 0 and nearly equal variances.

    .. math::
        e' = (e - \mu) W, \qquad W = \bigl(U (\Lambda + \varepsilon \bar\lambda I)^{-1/2}\bigr)_{[:, :k]}, \qquad
        \Sigma = U \Lambda U^\top

    with mean :math:`\mu` and covariance :math:`\Sigma` of the texts' embeddings, and the mean :math:`\bar\lambda` of
    its eigenvalues. With :math:`\varepsilon = 0` this is Su et al. (2021, arXiv 2103.15316). A covariance that is
    estimated on few texts has directions of far too little variance, which plain whitening scales up; the shrinkage
    :math:`\varepsilon` bounds by how much (towards a multiple of the identity, as in Ledoit and Wolf, 2004).
    Directions are in the order of falling variance, so that ``truncate_dim=n`` gives the same as ``dimension=n``.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).
        weight: (k, D), the transpose of W.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    SHAPES = {"mean": "D", "weight": "kD"}
    FIT_SETTINGS = ("dimension", "shrinkage")

    mean: Tensor
    weight: Tensor

    def __init__(self, mean: Tensor, weight: Tensor) -> None:
        super().__init__(mean=mean, weight=weight)

    @classmethod
    def from_moments(cls, moments: Moments, *, dimension: int | None = None, shrinkage: float = SHRINKAGE) -> Self:
        r"""Fit on mean and covariance of embeddings.

        Args:
            moments: Moments of embeddings (D,).
            dimension: Number of directions to keep, k, those of largest variance. None: all D; without shrinkage D - 1
                where the embeddings vary in no more, as those of a backbone that ends in a LayerNorm (GPT-2, OPT).
            shrinkage: :math:`\varepsilon`, 0 or more, added to each direction's variance as a share of their mean. With
                0, every direction gets variance 1 over these texts, of which there must be more than ``dimension``.

        Raises:
            ValueError: As for :meth:`fit`.
        """
        size = len(moments.mean)
        check_count("dimension", dimension, 1, size, "the directions to keep")
        check_shrinkage(shrinkage, SHRINKAGE, plain=True)
        check_that_they_vary(moments)
        variances, directions = principal_directions(moments.covariance)
        kept = _rank_to_keep(moments.count, variances, dimension) if shrinkage == 0 else dimension or size
        # Rounding makes a variance of 0 slightly negative.
        variances = variances.clamp(min=0)
        scales = (variances + shrinkage * variances.mean()).sqrt()
        return cls(moments.mean, directions[:kept] / scales[:kept, None])

    def _transform(self, embedding: Tensor) -> Tensor:
        return linear(embedding - self.mean.to(embedding.dtype), self.weight.to(embedding.dtype))


def _rank_to_keep(count: int, variances: Tensor, dimension: int | None) -> int:
    """Return the number of directions that plain whitening keeps. It divides by their variances."""
    kept = len(variances) if dimension is None else dimension
    # Variance below this is rounding error of the embeddings.
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


class AllButTheTop(FittedTransform):
    r"""Subtracts the mean embedding of a collection, and each embedding's part in d principal directions.

    .. math:: e' = \tilde{e} - \sum_{i=1}^{d} (u_i^\top \tilde{e}) \, u_i, \qquad \tilde{e} = e - \mu

    (Mu & Viswanath, 2018, arXiv 1702.01417.)

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).
        directions: (k, D), orthonormal rows; k = d may be 0.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    SHAPES = {"mean": "D", "directions": "nD"}
    FIT_SETTINGS = ("removed",)

    mean: Tensor
    directions: Tensor

    def __init__(self, mean: Tensor, directions: Tensor) -> None:
        super().__init__(mean=mean, directions=directions)

    @classmethod
    def from_moments(cls, moments: Moments, *, removed: int | None = None) -> Self:
        """Fit on mean and covariance of embeddings.

        Args:
            moments: Moments of embeddings (D,), of at least ``removed`` + 2 texts, and better some thousands.
            removed: Number of directions to remove, d; None: D / 100, and at least 1. 0 subtracts the mean alone.

        Raises:
            ValueError: If ``removed`` is out of range, or the texts are too few.
        """
        size = len(moments.mean)
        check_count("removed", removed, 0, size - 1, "the principal directions to remove")
        count = max(1, size // 100) if removed is None else removed
        # d + 1 texts vary in d directions at most, so that nothing would be left.
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


def check_count(name: str, value: int | None, least: int, most: int, meaning: str) -> None:
    """Raise unless a number of directions, or None, is within bounds."""
    if value is not None:
        check_int(name, value, least, most, f"give {meaning}, a whole number from {least} to {most}.")


def check_shrinkage(value: float, default: float, *, plain: bool) -> None:
    """Raise unless a number can be added to the variance of each direction.

    Args:
        value: Share of the mean variance.
        default: Usual share, for the error message.
        plain: Whether 0 is allowed, which means plain whitening.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    allowed, ending = ("a number, 0 or more", ", and 0 is plain whitening") if plain else ("a number above 0", "")
    check(
        "shrinkage",
        value,
        is_number and (0 < value < math.inf or (plain and value == 0)),
        f"give {allowed}: what is added to the variance of each direction, as a share of their mean. {default:g} is "
        f"usual{ending}.",
    )


def check_that_they_vary(moments: Moments) -> None:
    """Raise if embeddings are equal but for rounding, or there are none: nothing can be fitted on them."""
    rounding = torch.finfo(torch.float32).eps * moments.mean.norm()
    if moments.count < 2 or moments.variances.sum() <= rounding**2:
        raise ValueError(
            f"{moments.count} texts were given, and their embeddings do not differ: give two texts or more that do, "
            "and better some hundreds."
        )
