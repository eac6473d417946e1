"""What stands behind modules whose embeddings are made of parts: each part is whitened, or standardised and added."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import normalize

from .causal_module import CausalModule
from .embedding_transforms import ROUNDING, EmbeddingTransform, check_shrinkage, check_that_they_vary
from .moments import Moments, embedding_moments, principal_directions

#: What is added to the variance of each direction by default, as a share of their mean.
SHRINKAGE = 10.0


class _OfParts(EmbeddingTransform):
    """Base of what is made for embeddings of P parts, each of which counts for a share."""

    config_keys = [*EmbeddingTransform.config_keys, "shares"]

    mean: Tensor

    def __init__(self, shares: Sequence[float], mean: Tensor, **weights: Tensor) -> None:
        self.shares = checked_shares(shares)
        if len(mean) != len(self.shares):
            raise ValueError(f"shares={self.shares} for {len(mean)} parts: give one for each.")
        super().__init__(mean=mean, **weights)
        self.in_features = mean.numel()

    def _counts(self, parts: Tensor) -> Tensor:
        """The shares of parts (..., P, D), as (P, 1)."""
        return torch.tensor(self.shares, dtype=parts.dtype, device=parts.device)[:, None]


class PartwiseWhitening(_OfParts):
    r"""Standardises and decorrelates each part of an embedding on its own, and gives each a length of its own.

    .. math::
        e' = \Bigl[ \sqrt{s_p} \frac{z_p W_p}{\lVert z_p W_p \rVert} \Bigr]_{p = 1, \dots, P}, \qquad
        z_p = (e_p - \mu_p) V_p^{-1/2}, \qquad
        W_p = U_p (\Lambda_p + \varepsilon \bar\lambda_p I)^{-1/2}

    with the means :math:`\mu_p` and variances :math:`V_p` (a diagonal matrix) of part p over a collection of texts, and
    their correlation matrix :math:`U_p \Lambda_p U_p^\top` (PCA-cor whitening, Kessy et al., 2018, arXiv 1512.00809,
    shrunk). As part p has the length :math:`\sqrt{s_p}`, the cosine of two embeddings is the mean of their parts'
    cosines, weighted by the shares :math:`s_p`, whose sum is 1. Dimensions in which the collection does not vary
    are left out.

    A large :math:`\varepsilon` does little more than standardise; a small one gives all directions nearly one variance,
    as :class:`WhiteningTransform` does. Directions stand in the order of falling variance within each part, so
    ``truncate_dim`` would cut off whole parts: leave it out.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (P, D).
        weight: (P, D, D), the transposes of :math:`V_p^{-1/2} W_p`.
        shares: P numbers above 0, whose sum is 1.

    Raises:
        ValueError: If the shapes do not fit each other, or the shares are none.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    weight: Tensor

    def __init__(self, mean: Tensor, weight: Tensor, shares: Sequence[float]) -> None:
        if mean.ndim != 2 or not mean.numel() or weight.shape != (*mean.shape, mean.shape[1]):
            raise ValueError(f"mean is {tuple(mean.shape)} and weight {tuple(weight.shape)}: give (P, D), (P, D, D).")
        super().__init__(shares, mean, weight=weight)
        self.out_features = self.in_features

    @classmethod
    def fit(
        cls,
        model: SentenceTransformer,
        texts: Iterable[str],
        *,
        shares: Sequence[float] | None = None,
        shrinkage: float = SHRINKAGE,
        **kwargs: Any,
    ) -> Self:
        r"""Fit on the embeddings that a model gives texts, however many: they are never held together.

        Args:
            model: What the module will stand behind, whole: ``SentenceTransformer(modules=[*model, module])``.
            texts: Any iterable of strings; no labels are needed. Some hundreds are enough.
            shares: How much each part counts; there are as many parts, of equal width. None: those of the model's first
                module, (0.3, 0.7) for :class:`EarlyLateModule`; any other's vectors are one part.
            shrinkage: :math:`\varepsilon`, above 0: what is added to each direction's variance, as a share of their
                mean.
            **kwargs: For :func:`~.moments.embedding_moments`: ``chunk_size``, ``batch_size``, ``prompt_name`` ...

        Raises:
            ValueError: If a setting is out of range, the embeddings cannot be cut into so many equal parts, or the
                texts are too few or too much alike.
        """
        shares = shares_of(model, shares)
        check_shrinkage(shrinkage, SHRINKAGE, plain=False)
        return cls.from_moments(embedding_moments(model, texts, **kwargs), shares=shares, shrinkage=shrinkage)

    @classmethod
    def from_moments(cls, moments: Moments, *, shares: Sequence[float], shrinkage: float = SHRINKAGE) -> Self:
        """Fit on the mean and covariance of embeddings.

        Args:
            moments: Of embeddings (P * D,).
            shares: How much each of the P parts counts: numbers above 0, whose sum is 1.
            shrinkage: As for :meth:`fit`.

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
            # Where there is none, rounding makes a variance slightly negative.
            variances = variances.clamp(min=0)
            # Their mean over the dimensions that vary: the others are left out.
            mean_variance = variances.sum() / scale.count_nonzero()
            weights.append(directions * scale / (variances + shrinkage * mean_variance).sqrt()[:, None])
        return cls(mean, torch.stack(weights), shares)

    def _transform(self, embedding: Tensor) -> Tensor:
        mean, weight = self.mean.to(embedding.dtype), self.weight.to(embedding.dtype)
        parts = embedding.unflatten(-1, tuple(mean.shape)) - mean
        mapped = normalize(torch.einsum("...pd,pkd->...pk", parts, weight), dim=-1)
        return (mapped * self._counts(mapped).sqrt()).flatten(-2)


class StandardizedSum(_OfParts):
    r"""Standardises each part of an embedding, scales it to length one, and adds the parts.

    .. math::
        e' = \sum_{p=1}^{P} s_p \frac{z_p}{\lVert z_p \rVert}, \qquad z_{p,j} = (e_{p,j} - \mu_{p,j}) / \sigma_{p,j}

    with the means :math:`\mu_p` and standard deviations :math:`\sigma_p` of part p over a collection of texts. States
    of a language model that are read at several places share a basis, so they are added, not kept side by side: the
    P * D values become D. Of dimensions in which the collection does not vary, nothing is left.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (P, D), :math:`\mu`.
        scale: (P, D), :math:`1 / \sigma`; 0 leaves a dimension out.
        shares: s, P numbers above 0, whose sum is 1.

    Raises:
        ValueError: If the shapes do not fit each other, or the shares are none.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor, shares: Sequence[float]) -> None:
        if mean.ndim != 2 or not mean.numel() or mean.shape != scale.shape:
            raise ValueError(f"mean is {tuple(mean.shape)} and scale {tuple(scale.shape)}: give (P, D) for both.")
        super().__init__(shares, mean, scale=scale)
        self.out_features = mean.shape[1]

    @classmethod
    def fit(
        cls, model: SentenceTransformer, texts: Iterable[str], *, shares: Sequence[float] | None = None, **kwargs: Any
    ) -> Self:
        """Fit on the embeddings that a model gives texts, however many: they are never held together.

        Args:
            model: What the module will stand behind, whole: ``SentenceTransformer(modules=[*model, module])``.
            texts: Any iterable of strings; no labels are needed. Fifty like those to embed are enough.
            shares: How much each part counts; there are as many parts, of equal width. None: those of the model's first
                module, one each for :class:`TopicModule`; any other's vectors are one part.
            **kwargs: For :func:`~.moments.embedding_moments`: ``chunk_size``, ``batch_size``, ``prompt_name`` ...

        Raises:
            ValueError: If the shares are none, the embeddings cannot be cut into so many equal parts, or the texts are
                too few or too much alike.
        """
        shares = shares_of(model, shares)
        return cls.from_moments(embedding_moments(model, texts, covariance=False, **kwargs), shares=shares)

    @classmethod
    def from_moments(cls, moments: Moments, *, shares: Sequence[float]) -> Self:
        """Fit on the mean and variances of embeddings.

        Args:
            moments: Of embeddings (P * D,); variances are enough.
            shares: How much each of the P parts counts: numbers above 0, whose sum is 1.

        Raises:
            ValueError: As for :meth:`fit`.
        """
        return cls(*standardization_of_parts(moments, shares), shares)

    def _transform(self, embedding: Tensor) -> Tensor:
        mean, scale = self.mean.to(embedding.dtype), self.scale.to(embedding.dtype)
        parts = normalize((embedding.unflatten(-1, tuple(mean.shape)) - mean) * scale, dim=-1)
        return (parts * self._counts(parts)).sum(dim=-2)


def checked_shares(shares: Sequence[float]) -> list[float]:
    """How much each part counts.

    Raises:
        ValueError: If they are not numbers above 0 whose sum is 1.
    """
    listed = list(shares) if isinstance(shares, Sequence) and not isinstance(shares, str) else []
    numbers = all(isinstance(share, (int, float)) and share > 0 for share in listed)
    if not listed or not numbers or not math.isclose(sum(listed), 1, abs_tol=1e-6):
        raise ValueError(
            f"shares={shares!r}: give how much each part counts, numbers above 0 whose sum is 1, such as (0.3, 0.7)."
        )
    return [float(share) for share in listed]


def shares_of(model: SentenceTransformer, given: Sequence[float] | None) -> list[float]:
    """The shares that are given; None: those of the model's first module, or one part."""
    if given is None:
        given = model[0].shares if isinstance(model[0], CausalModule) else CausalModule.shares
    return checked_shares(given)


def standardization_of_parts(moments: Moments, shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """What standardises each part of embeddings.

    Args:
        moments: Of embeddings (P * D,); variances are enough.
        shares: How much each of the P parts counts.

    Returns:
        The mean (P, D), and what each dimension less its mean is multiplied by, (P, D): the inverse of its deviation,
        or 0 where it does not vary, as it then has no scale, and nothing to say.

    Raises:
        ValueError: If the embeddings cannot be cut into so many equal parts, or a part does not vary.
    """
    if len(moments.mean) % len(checked_shares(shares)):
        raise ValueError(
            f"shares={list(shares)}: embeddings of {len(moments.mean)} values cannot be cut into {len(shares)} "
            "equal parts. Give as many shares as the module in front hands on parts."
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
