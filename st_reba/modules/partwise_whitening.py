"""Whitening of embeddings that are made of parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import normalize

from ..moments import Moments, embedding_moments, principal_directions
from .transform import EmbeddingTransform, check_that_they_vary
from .whitening import check_shrinkage

if TYPE_CHECKING:
    from typing_extensions import Self

#: What is added to the variance of each direction, as a share of their mean.
SHRINKAGE = 10.0
#: How much each half of :class:`st_reba.EarlyLateModule`'s embeddings counts.
SHARES = (0.3, 0.7)


class PartwiseWhitening(EmbeddingTransform):
    r"""Gives the parts of embeddings an equal scale and few directions that dwarf others, each part on its own.

    .. math::
        z_p = \Sigma_p^{-1/2} (e_p - \mu_p), \qquad
        e' = \Bigl[ \sqrt{s_p} \frac{z_p W_p}{\lVert z_p W_p \rVert} \Bigr]_p, \qquad
        W_p = U_p (\Lambda_p + \varepsilon \bar\lambda_p I)^{-1/2}

    with mean :math:`\mu_p` and variances :math:`\Sigma_p` (a diagonal) of part p over a collection of texts, and their
    correlation matrix :math:`U_p \Lambda_p U_p^\top` (PCA-cor whitening, Kessy et al., 2018, arXiv 1512.00809, shrunk).
    As each part has length :math:`\sqrt{s_p}`, the cosine of two embeddings is the mean of the parts' cosines, weighted
    by the shares :math:`s_p`, which sum to 1.

    A large :math:`\varepsilon` little more than standardises, which suits topics; a small one whitens, which suits
    paraphrases.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (P, D).
        weight: (P, D, D), :math:`\Sigma_p^{-1/2} W_p`.
        shares: (P,), above 0, with the sum 1.

    Raises:
        ValueError: If the shapes do not fit each other, or the shares do not sum to 1.
    """

    mean: Tensor
    weight: Tensor
    shares: Tensor

    def __init__(self, mean: Tensor, weight: Tensor, shares: Tensor) -> None:
        super().__init__()
        if mean.ndim != 2 or weight.shape != (*mean.shape, mean.shape[1]) or shares.shape != mean.shape[:1]:
            raise ValueError(
                f"mean is {tuple(mean.shape)}, weight {tuple(weight.shape)} and shares {tuple(shares.shape)}: give "
                "(P, D), (P, D, D) and (P,)."
            )
        self.in_features = self.out_features = mean.numel()
        self._keep(mean=mean, weight=weight, shares=shares)
        _check_shares(self.shares.tolist())

    @classmethod
    def fit(
        cls,
        model: SentenceTransformer,
        texts: Iterable[str],
        *,
        shares: Sequence[float] = SHARES,
        shrinkage: float = SHRINKAGE,
        **kwargs: Any,
    ) -> Self:
        """Fit on the embeddings that a model gives texts, however many: they are never held together.

        Args:
            model: What the module will stand behind, whole: ``SentenceTransformer(modules=[*model, module])``.
            texts: Any iterable of strings; no labels are needed. Some hundreds are enough.
            shares: How much each part counts; there are as many parts, of equal width.
            shrinkage: :math:`\varepsilon`, more than 0.
            **kwargs: For :func:`st_reba.moments.embedding_moments`: ``chunk_size``, ``batch_size``, ``prompt_name`` ...

        Raises:
            ValueError: If a setting is out of range, or the texts are too few or too much alike.
        """
        _check_settings(shares, shrinkage)
        return cls.from_moments(embedding_moments(model, texts, **kwargs), shares=shares, shrinkage=shrinkage)

    @classmethod
    def from_moments(cls, moments: Moments, *, shares: Sequence[float] = SHARES, shrinkage: float = SHRINKAGE) -> Self:
        """Fit on the mean and covariance of embeddings.

        Args:
            moments: Of embeddings (P * D,).
            shares: As for :meth:`fit`.
            shrinkage: As for :meth:`fit`.

        Raises:
            ValueError: As for :meth:`fit`, or if the embeddings cannot be cut into so many equal parts.
        """
        _check_settings(shares, shrinkage)
        check_that_they_vary(moments)
        whole, parts = len(moments.mean), len(shares)
        if whole % parts:
            raise ValueError(f"shares={list(shares)}: {whole} dimensions cannot be cut into {parts} equal parts.")
        mean = moments.mean.view(parts, -1)
        width = mean.shape[1]
        weights = []
        for part in range(parts):
            own = slice(part * width, (part + 1) * width)
            covariance = moments.covariance[own, own]
            deviation = covariance.diagonal().sqrt()
            # What does not vary has no scale: it is only centred.
            deviation = deviation.masked_fill(deviation <= _ROUNDING * mean[part].abs(), math.inf)
            scale = deviation.reciprocal()
            variances, directions = principal_directions(scale[:, None] * covariance * scale)
            variances = variances.clamp(min=0)
            scales = (variances + shrinkage * variances.mean()).rsqrt()
            weights.append(directions * scale * scales[:, None])
        return cls(mean, torch.stack(weights), torch.tensor(shares, dtype=torch.float64))

    def _transform(self, embedding: Tensor) -> Tensor:
        mean, weight, shares = (each.to(embedding.dtype) for each in (self.mean, self.weight, self.shares))
        parts = embedding.unflatten(-1, tuple(mean.shape)) - mean
        mapped = normalize(torch.einsum("...pd,pkd->...pk", parts, weight), dim=-1)
        return (mapped * shares.sqrt()[:, None]).flatten(-2)


# Deviations below this share of a dimension's mean are rounding of the embeddings.
_ROUNDING = 10 * torch.finfo(torch.float32).eps


def _check_settings(shares: Sequence[float], shrinkage: float) -> None:
    _check_shares(shares)
    check_shrinkage(shrinkage)
    if shrinkage == 0:
        raise ValueError("shrinkage=0: a part has directions in which texts do not vary; give more than 0.")


def _check_shares(shares: Sequence[float]) -> None:
    if not shares or not all(share > 0 for share in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-5):
        raise ValueError(f"shares={list(shares)}: give how much each part counts, each above 0, with the sum 1.")
