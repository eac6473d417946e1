"""Filters: maps of sentence embeddings by a language model's head or fitted on plain texts, and weights of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, ClassVar, Self, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from torch.nn.functional import linear, normalize
from transformers import PreTrainedModel

from ..lm.attention.kernels import widen
from ..moments import Moments, embedding_moments, in_chunks, principal_directions
from ..settings import check, check_int, first_not_none
from .base import CausalModule
from .lm_head import head_blocks
from .stored import FixedWeights
from .vectors import ONE_BY_ONE

#: A deviation below this share of a dimension's mean is rounding error of the embeddings.
ROUNDING = 10 * torch.finfo(torch.float32).eps

#: Defaults of the variance that is added to each direction, as a share of the mean variance.
SHRINKAGE = 0.1
PARTWISE_SHRINKAGE = 10.0


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
        wide = widen(vectors)
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


class EmbeddingFilter(EmbeddingTransform):
    r"""Keeps the part of an embedding in the middle singular directions of the language model's head.

    .. math:: e' = V_{[low, high)}^\top e, \qquad W = U \Sigma V^\top \in \mathbb{R}^{|\mathcal{V}| \times D}

    (EmbedFilter, arXiv 2606.07502.) Frequent, uninformative tokens use the directions with the largest and the smallest
    singular values. The others are in the order of falling singular values, so that ``truncate_dim=n`` gives the same
    as ``keep=(low, low + n)``.

    Use :meth:`from_language_model`.

    Args:
        directions: (k, D), orthonormal rows.
        low: Number of directions with larger singular values that were left out.

    Raises:
        ValueError: If ``directions`` are not a matrix of at most D rows, or ``low`` does not fit them.
    """

    config_keys = [*EmbeddingTransform.config_keys, "low"]

    SHAPES = {"directions": "kD"}

    directions: Tensor

    def __init__(self, directions: Tensor, low: int = 0) -> None:
        super().__init__(directions=directions)
        self.low = check_int("low", low, 0, self.in_features - self.out_features)

    @classmethod
    def from_language_model(
        cls,
        model_or_path: str | PathLike[str] | SentenceTransformer | Transformer | PreTrainedModel,
        *,
        keep: tuple[int, int] | None = None,
        device: str | torch.device = "cpu",
        **hub_kwargs: Any,
    ) -> EmbeddingFilter:
        """Compute the filter of a language model.

        The right singular vectors of W (V, D) are the eigenvectors of W^T W (D, D), which is summed over blocks of the
        vocabulary in float64: memory does not grow with V.

        Args:
            model_or_path: Path or Hub id of a language model, of which only the head is read; or a loaded model, module
                or pipeline.
            keep: Range of directions to keep, (low, high), from 0 in the order of falling singular values. None: the
                middle half, as in the authors' code.
            device: Device on which to compute; it needs float64.
            **hub_kwargs: ``revision``, ``token``, ``cache_folder`` and ``local_files_only`` of the checkpoint.

        Raises:
            ValueError: If there is no head, or the choice keeps nothing or is out of range.
        """
        blocks = (block.to(device, torch.float64) for block in head_blocks(model_or_path, **hub_kwargs))
        gram = cast(Tensor, sum(rows.mT @ rows for rows in blocks))
        dimension = len(gram)
        half = max(1, dimension // 2)
        keep = first_not_none(keep, ((dimension - half) // 2, (dimension + half) // 2))
        is_pair = isinstance(keep, (tuple, list)) and [*map(type, keep)] == [int, int]
        advice = f"give (low, high) with 0 <= low < high <= {dimension}, the number of the head's directions."
        low, high = check("keep", keep, is_pair and 0 <= keep[0] < keep[1] <= dimension, advice)
        _, directions = principal_directions(gram)
        return cls(directions[low:high].cpu(), low)

    def _transform(self, embedding: Tensor) -> Tensor:
        return linear(embedding, self.directions.to(embedding.dtype))


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
                ``batch_size`` and ``prompt_name``.

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
        return embedding - self.mean


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
        return (embedding - self.mean) / self.deviation


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
        kept = check_int("dimension", first_not_none(dimension, size), 1, size)
        check_shrinkage(shrinkage, or_zero=True)
        check_that_they_vary(moments)
        variances, directions = principal_directions(moments.covariance)
        if shrinkage == 0:
            kept = _rank_to_keep(moments.count, variances, dimension)
        # Rounding makes a variance of 0 slightly negative.
        variances = variances.clamp(min=0)
        scales = (variances + shrinkage * variances.mean()).sqrt()
        return cls(moments.mean, directions[:kept] / scales[:kept, None])

    def _transform(self, embedding: Tensor) -> Tensor:
        return linear(embedding - self.mean.to(embedding.dtype), self.weight.to(embedding.dtype))


def _rank_to_keep(count: int, variances: Tensor, dimension: int | None) -> int:
    """Return the number of directions that plain whitening keeps. It divides by their variances."""
    # Variance below this is rounding error of the embeddings.
    noise = variances[0] * len(variances) * torch.finfo(torch.float32).eps ** 2
    rank = int((variances > noise).sum())
    kept = dimension or max(rank, len(variances) - 1)
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
        count = check_int("removed", first_not_none(removed, max(1, size // 100)), 0, size - 1)
        # d + 1 texts vary in d directions at most, so that nothing would be left.
        if moments.count < count + 2:
            raise ValueError(
                f"{moments.count} texts are too few to find {count} principal directions: give {count + 2} or more."
            )
        _, directions = principal_directions(moments.covariance)
        return cls(moments.mean, directions[:count])

    def _transform(self, embedding: Tensor) -> Tensor:
        centred = embedding - self.mean.to(embedding.dtype)
        directions = self.directions.to(embedding.dtype)
        return centred - (centred @ directions.mT) @ directions


class _PartTransform(FittedTransform):
    """Base of transforms for embeddings of P parts of equal width, each with a weight.

    Args:
        shares: Weights of the parts.
        mean: (P, D).
        **weights: Other weights of the module.
    """

    config_keys = [*EmbeddingTransform.config_keys, "shares"]
    FIT_SETTINGS: ClassVar[tuple[str, ...]] = ("shares",)

    mean: Tensor

    def __init__(self, shares: Sequence[float], mean: Tensor, **weights: Tensor) -> None:
        self.shares = check_part_weights(shares)
        super().__init__(mean=mean, **weights)
        if len(mean) != len(self.shares):
            raise ValueError(f"shares={self.shares} for {len(mean)} parts: give one for each.")
        self.in_features = mean.numel()

    @classmethod
    def fit(
        cls, model: SentenceTransformer, texts: Iterable[str], *, shares: Sequence[float] | None = None, **kwargs: Any
    ) -> Self:
        """Fit on the embeddings that a model gives texts. They are never in memory together.

        Args:
            model: The whole model that precedes the new module: ``SentenceTransformer(modules=[*model, module])``.
            texts: Strings; no labels are needed. Some hundreds are enough, and fifty for a sum.
            shares: Weights of the parts, which have equal width. None: ``part_weights`` of the model's first module,
                such as (0.3, 0.7) for :class:`EarlyLateModule`; the vectors of most modules are one part.
            **kwargs: As for :meth:`FittedTransform.fit`.

        Raises:
            ValueError: If a setting is out of range, the embeddings cannot be divided into so many parts, or the texts
                are too few or too similar.
        """
        shares = first_not_none(shares, getattr(model[0], "part_weights", (1.0,)))
        return super().fit(model, texts, shares=check_part_weights(shares), **kwargs)


class PartwiseWhitening(_PartTransform):
    r"""Standardises and decorrelates each part of an embedding on its own, and scales each to a length of its own.

    .. math::
        e' = \Bigl[ \sqrt{s_p} \frac{z_p W_p}{\lVert z_p W_p \rVert} \Bigr]_{p = 1, \dots, P}, \qquad
        z_p = (e_p - \mu_p) V_p^{-1/2}, \qquad
        W_p = U_p (\Lambda_p + \varepsilon \bar\lambda_p I)^{-1/2}

    with the means :math:`\mu_p` and variances :math:`V_p` (a diagonal matrix) of part p over a collection of texts, and
    their correlation matrix :math:`U_p \Lambda_p U_p^\top` (PCA-cor whitening, Kessy et al., 2018, arXiv 1512.00809,
    with shrinkage). As part p has the length :math:`\sqrt{s_p}`, the cosine of two embeddings is the mean of their
    parts' cosines, weighted by :math:`s_p`. Dimensions that do not vary over the collection are left out.

    A large :math:`\varepsilon` does little more than standardise; a small one gives all directions nearly equal
    variances, as :class:`WhiteningTransform` does. Directions are in the order of falling variance within each part, so
    ``truncate_dim`` would remove whole parts: do not use it.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (P, D).
        weight: (P, D, D), the transposes of :math:`V_p^{-1/2} W_p`.
        shares: Weights of the parts, s: P numbers above 0 whose sum is 1.

    Raises:
        ValueError: If the shapes do not fit each other, or ``shares`` are not such numbers.
    """

    SHAPES = {"mean": "PD", "weight": "PDD"}
    FIT_SETTINGS = ("shares", "shrinkage")

    weight: Tensor

    def __init__(self, mean: Tensor, weight: Tensor, shares: Sequence[float]) -> None:
        super().__init__(shares, mean, weight=weight)
        self.out_features = self.in_features

    @classmethod
    def from_moments(cls, moments: Moments, *, shares: Sequence[float], shrinkage: float = PARTWISE_SHRINKAGE) -> Self:
        r"""Fit on mean and covariance of embeddings.

        Args:
            moments: Moments of embeddings (P * D,).
            shares: Weights of the P parts: numbers above 0 whose sum is 1.
            shrinkage: :math:`\varepsilon`, above 0, added to each direction's variance as a share of their mean.

        Raises:
            ValueError: As for :meth:`fit`.
        """
        check_shrinkage(shrinkage)
        mean, scales = standardization_of_parts(moments, shares)
        width = mean.shape[1]
        weights = []
        for part, scale in enumerate(scales):
            values = slice(part * width, (part + 1) * width)
            correlation = scale[:, None] * moments.covariance[values, values] * scale
            variances, directions = principal_directions(correlation)
            # Rounding makes a variance of 0 slightly negative.
            variances = variances.clamp(min=0)
            # The mean over those dimensions that vary, as the others are left out.
            mean_variance = variances.sum() / scale.count_nonzero()
            weights.append(directions * scale / (variances + shrinkage * mean_variance).sqrt()[:, None])
        return cls(mean, torch.stack(weights), shares)

    def _transform(self, embedding: Tensor) -> Tensor:
        mean, weight = self.mean.to(embedding.dtype), self.weight.to(embedding.dtype)
        parts = embedding.unflatten(-1, tuple(mean.shape)) - mean
        mapped = normalize(torch.einsum("...pd,pkd->...pk", parts, weight), dim=-1)
        return (mapped * mapped.new_tensor(self.shares)[:, None].sqrt()).flatten(-2)


class StandardizedSum(_PartTransform):
    r"""Standardises each part of an embedding, scales it to length 1, and adds the parts.

    .. math::
        e' = \sum_{p=1}^{P} s_p \frac{z_p}{\lVert z_p \rVert}, \qquad z_{p,j} = (e_{p,j} - \mu_{p,j}) / \sigma_{p,j}

    with the means :math:`\mu_p` and standard deviations :math:`\sigma_p` of part p over a collection of texts. Hidden
    states that are read at several layers or tokens share a basis, so that they can be added: the P * D values become
    D. Dimensions that do not vary over the collection are 0.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (P, D), :math:`\mu`.
        scale: (P, D), :math:`1 / \sigma`; 0 leaves a dimension out.
        shares: Weights of the parts, s: P numbers above 0 whose sum is 1.

    Raises:
        ValueError: If the shapes do not fit each other, or ``shares`` are not such numbers.
    """

    SHAPES = {"mean": "PD", "scale": "PD"}
    NEEDS_COVARIANCE = False

    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor, shares: Sequence[float]) -> None:
        super().__init__(shares, mean, scale=scale)

    @classmethod
    def from_moments(cls, moments: Moments, *, shares: Sequence[float]) -> Self:
        """Fit on mean and variances of embeddings.

        Args:
            moments: Moments of embeddings (P * D,); variances are enough.
            shares: Weights of the P parts: numbers above 0 whose sum is 1.

        Raises:
            ValueError: As for :meth:`fit`.
        """
        return cls(*standardization_of_parts(moments, shares), shares)

    def _transform(self, embedding: Tensor) -> Tensor:
        parts = normalize((embedding.unflatten(-1, tuple(self.mean.shape)) - self.mean) * self.scale, dim=-1)
        return (parts * parts.new_tensor(self.shares)[:, None]).sum(dim=-2)


def check_part_weights(shares: Sequence[float]) -> list[float]:
    """Return the weights of parts as a list.

    Raises:
        ValueError: If they are not numbers above 0 whose sum is 1.
    """
    numbers = list(shares) if isinstance(shares, Sequence) and not isinstance(shares, str) else []
    are_positive = all(isinstance(number, (int, float)) and number > 0 for number in numbers)
    is_whole = bool(numbers) and are_positive and math.isclose(sum(numbers), 1, abs_tol=1e-6)
    advice = "give how much each part counts, numbers above 0 whose sum is 1, such as (0.3, 0.7)."
    check("shares", shares, is_whole, advice)
    return [float(number) for number in numbers]


def standardization_of_parts(moments: Moments, shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Compute mean and scale of each part of embeddings.

    Args:
        moments: Moments of embeddings (P * D,); variances are enough.
        shares: Weights of the P parts.

    Returns:
        The mean, (P, D), and the inverse of each dimension's deviation, (P, D), which is 0 where it does not vary.

    Raises:
        ValueError: If the embeddings cannot be divided into so many equal parts, or a part does not vary.
    """
    if len(moments.mean) % len(check_part_weights(shares)):
        raise ValueError(
            f"shares={list(shares)}: embeddings of {len(moments.mean)} values cannot be cut into {len(shares)} "
            "equal parts. Give one share for each part of the module in front."
        )
    check_that_they_vary(moments)
    mean = moments.mean.view(len(shares), -1)
    deviation = moments.variances.sqrt().view_as(mean)
    scales = deviation.reciprocal().masked_fill(deviation <= ROUNDING * mean.abs(), 0)
    if not scales.any(dim=1).all():
        raise ValueError(
            f"A part of the embeddings is the same for all {moments.count} texts: give texts that differ, and see that "
            "the module in front reads something of the text there."
        )
    return mean, scales


def check_shrinkage(value: float, *, or_zero: bool = False) -> None:
    """Raise unless a number can be added to the variance of each direction, as a share of their mean.

    Args:
        value: The number.
        or_zero: Whether 0 is allowed, which means plain whitening.
    """
    is_allowed = type(value) in (int, float) and (0 < value < math.inf or (or_zero and value == 0))
    example = "or 0 for plain whitening" if or_zero else f"such as {PARTWISE_SHRINKAGE:g}"
    check("shrinkage", value, is_allowed, f"give a number above 0, {example}.")


def check_that_they_vary(moments: Moments) -> None:
    """Raise if embeddings are equal but for rounding, or there are none: nothing can be fitted on them."""
    rounding = torch.finfo(torch.float32).eps * moments.mean.norm()
    if moments.count < 2 or moments.variances.sum() <= rounding**2:
        problem = f"{moments.count} texts were given, and their embeddings do not differ:"
        raise ValueError(f"{problem} give two texts or more that do, and better some hundreds.")


class IdfWeights(FixedWeights):
    r"""Weights each token's vector by its inverse document frequency, so that ``Pooling("mean")`` is the weighted mean.

    .. math:: e = \frac{\sum_i idf(w_i) \, e_i}{\sum_i idf(w_i)}, \qquad idf(w) = \ln \frac{1 + N}{1 + df(w)} + 1

    over N texts, df(w) of which have the token w. It precedes ``Pooling``, to which it gives the sum of the weights as
    ``token_weights_sum``, as sentence-transformers' ``WordWeights`` does for words. Poolings other than the mean do not
    divide by the sum: do not use them.

    Use :meth:`fit`.

    Args:
        weights: (V,), for each token id; 0 or more.

    Raises:
        ValueError: If they are not a vector, or one is below 0.
    """

    SHAPES = {"weights": "V"}
    SIZES = ("vocabulary_size",)
    config_keys: list[str] = [*SIZES]

    weights: Tensor

    def __init__(self, weights: Tensor) -> None:
        super().__init__(weights=weights)
        if (self.weights < 0).any():
            raise ValueError("A weight is below 0: give 0 or more for each token id.")
        self.vocabulary_size = len(weights)

    @classmethod
    def fit(cls, module: CausalModule, texts: Iterable[str]) -> Self:
        """Count the texts that contain each token, in one pass. The language model does not run.

        A token that is in none of the texts gets the largest weight. Texts without tokens do not count.

        Args:
            module: The module that precedes this one. The tokens that it returns are counted, with those of its
                template.
            texts: Strings, for instance a generator over the lines of a file. They are read once.

        Raises:
            ValueError: If ``texts`` is a string or has no tokens, or the module returns one token alone.
        """
        check_returns_all(module, "there is nothing to weigh.")
        total, counts = 0, torch.zeros(module.lm.vocabulary_size, dtype=torch.float64)
        for chunk in in_chunks(texts):
            layout = module.lay_out(chunk)[0]
            counted = module.selected(layout) & ~layout.is_empty[:, None]
            total += int(counted.any(dim=1).sum())
            for ids, of_text in zip(layout.input_ids, counted, strict=True):
                counts[ids[of_text].unique()] += 1
        if not total:
            raise ValueError("No texts with tokens were given: it is in them that tokens are counted.")
        # The smooth form that scikit-learn uses: a token that is in every text has 1.
        return cls(torch.log((1 + total) / (1 + counts)) + 1)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Weight the tokens.

        Args:
            features: With ``token_embeddings`` (B, n, D), and ``input_ids`` and ``attention_mask`` (B, n) to match.
            **kwargs: Ignored.

        Returns:
            The features with the weighted ``token_embeddings``, in the precision of the given ones, and
            ``token_weights_sum`` (B,).

        Raises:
            ValueError: If a token id has no weight.
        """
        states: Tensor = features["token_embeddings"]
        ids: Tensor = features["input_ids"]
        if int(ids.max()) >= self.vocabulary_size:
            raise ValueError(
                f"{type(self).__name__} has weights for {self.vocabulary_size} token ids and was given the id "
                f"{int(ids.max())}: put it right behind the module that it was made for."
            )
        weights = self.weights.float()[ids] * features["attention_mask"]
        return {
            **features,
            "token_embeddings": (widen(states) * weights[..., None]).to(states.dtype),
            # Rounding the sum changes the length of the mean, not its direction.
            "token_weights_sum": weights.sum(dim=1).to(states.dtype),
        }


def check_returns_all(module: CausalModule, consequence: str) -> None:
    """Raise if a module returns the last token alone.

    Raises:
        ValueError: If it does. The message ends in ``consequence``.
    """
    if module.rows == "last":
        raise ValueError(f'{type(module).__name__} returns one token alone, rows="last": {consequence}')
