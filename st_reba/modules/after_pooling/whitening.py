"""Whitening."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import linear

from .moments import Moments, embedding_moments, principal_directions, whole_dimension
from .transform import EmbeddingTransform, check_count, check_shrinkage, check_that_they_vary

#: What is added to each direction's variance by default, as a share of their mean.
SHRINKAGE = 0.1


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
        super().__init__()
        if weight.ndim != 2 or not 1 <= len(weight) <= weight.shape[1] or mean.shape != weight.shape[1:]:
            raise ValueError(
                f"mean is {tuple(mean.shape)} and weight {tuple(weight.shape)}: give (D,) and (k, D) with k from 1 "
                "to D."
            )
        self.out_features, self.in_features = weight.shape
        self._keep(mean=mean, weight=weight)

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
        if known := whole_dimension(model):
            check_count("dimension", dimension, 1, known, "the directions to keep")
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
    remedy = "or set shrinkage above 0, or give a lower dimension."
    if count <= kept:
        raise ValueError(
            f"{count} texts vary in at most {max(0, count - 1)} directions, so {kept} cannot be whitened without "
            f"shrinkage: give more than {kept} texts, {remedy}"
        )
    # What is below this is rounding of the embeddings, not variance.
    noise = variances[0] * len(variances) * torch.finfo(torch.float32).eps ** 2
    rank = int((variances > noise).sum())
    if dimension is None and rank == len(variances) - 1:
        return rank
    if rank < kept:
        raise ValueError(
            f"The embeddings of these {count} texts vary in {rank} directions only, so {kept} cannot be whitened "
            f"without shrinkage: give more varied texts, {remedy}"
        )
    return kept
