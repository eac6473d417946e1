"""The sum of the standardised parts of an embedding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import normalize

from .embedding_transforms import EmbeddingTransform
from .moments import Moments, embedding_moments
from .partwise_whitening import check_parts, checked_shares, shares_of, standardization_of_parts


class StandardizedSum(EmbeddingTransform):
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

    config_keys = [*EmbeddingTransform.config_keys, "shares"]

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor, shares: Sequence[float]) -> None:
        self.shares = checked_shares(shares)
        if mean.ndim != 2 or not mean.numel() or mean.shape != scale.shape:
            raise ValueError(f"mean is {tuple(mean.shape)} and scale {tuple(scale.shape)}: give (P, D) for both.")
        check_parts(mean, self.shares)
        super().__init__(mean=mean, scale=scale)
        self.in_features, self.out_features = mean.numel(), mean.shape[1]

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
        shares = torch.tensor(self.shares, dtype=embedding.dtype, device=embedding.device)
        return (parts * shares[:, None]).sum(dim=-2)
