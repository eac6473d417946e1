"""Transforms for embeddings that consist of parts: whitening of each part, or a sum of standardised parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import normalize

from ..moments import Moments, principal_directions
from ..settings import check
from .base import CausalModule
from .embedding_transforms import ROUNDING, EmbeddingTransform, FittedTransform, check_shrinkage, check_that_they_vary

#: Default of the variance that is added to each direction, as a share of the mean variance.
SHRINKAGE = 10.0


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

    def _part_weights(self, parts: Tensor) -> Tensor:
        """Return the weights of parts (..., P, D), (P, 1)."""
        return torch.tensor(self.shares, dtype=parts.dtype, device=parts.device)[:, None]

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
        if shares is None:
            shares = model[0].part_weights if isinstance(model[0], CausalModule) else CausalModule.part_weights
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
    def from_moments(cls, moments: Moments, *, shares: Sequence[float], shrinkage: float = SHRINKAGE) -> Self:
        r"""Fit on mean and covariance of embeddings.

        Args:
            moments: Moments of embeddings (P * D,).
            shares: Weights of the P parts: numbers above 0 whose sum is 1.
            shrinkage: :math:`\varepsilon`, above 0, added to each direction's variance as a share of their mean.

        Raises:
            ValueError: As for :meth:`fit`.
        """
        check_shrinkage(shrinkage, SHRINKAGE, plain=False)
        mean, scales = standardization_of_parts(moments, shares)
        width = mean.shape[1]
        weights = []
        for part, scale in enumerate(scales):
            own = slice(part * width, (part + 1) * width)
            covariance = moments.covariance[own, own]
            variances, directions = principal_directions(scale[:, None] * covariance * scale)
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
        return (mapped * self._part_weights(mapped).sqrt()).flatten(-2)


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
        mean, scale = self.mean.to(embedding.dtype), self.scale.to(embedding.dtype)
        parts = normalize((embedding.unflatten(-1, tuple(mean.shape)) - mean) * scale, dim=-1)
        return (parts * self._part_weights(parts)).sum(dim=-2)


def check_part_weights(shares: Sequence[float]) -> list[float]:
    """Return the weights of parts as a list.

    Raises:
        ValueError: If they are not numbers above 0 whose sum is 1.
    """
    numbers = list(shares) if isinstance(shares, Sequence) and not isinstance(shares, str) else []
    are_positive = all(isinstance(number, (int, float)) and number > 0 for number in numbers)
    check(
        "shares",
        shares,
        bool(numbers) and are_positive and math.isclose(sum(numbers), 1, abs_tol=1e-6),
        "give how much each part counts, numbers above 0 whose sum is 1, such as (0.3, 0.7).",
    )
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
    for part, scale in enumerate(scales, start=1):
        if not scale.any():
            raise ValueError(
                f"Part {part} of {len(shares)} of the embeddings is the same for all {moments.count} texts: give "
                "texts that differ, and see that the module in front reads something of the text there."
            )
    return mean, scales
