"""All-but-the-top."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sentence_transformers import SentenceTransformer
from torch import Tensor

from .moments import Moments, embedding_moments, principal_directions, whole_dimension
from .transform import EmbeddingTransform, check_count


class AllButTheTop(EmbeddingTransform):
    r"""Takes from each embedding the mean of a collection's, and its part in their d principal directions.

    .. math:: e' = \tilde{e} - \sum_{i=1}^{d} (u_i^\top \tilde{e}) \, u_i, \qquad \tilde{e} = e - \mu

    (Mu & Viswanath, 2018, arXiv 1702.01417.) The dimension stays D.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).
        directions: (d, D), orthonormal rows; d may be 0.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    mean: Tensor
    directions: Tensor

    def __init__(self, mean: Tensor, directions: Tensor) -> None:
        super().__init__()
        if directions.ndim != 2 or len(directions) >= directions.shape[1] or mean.shape != directions.shape[1:]:
            raise ValueError(
                f"mean is {tuple(mean.shape)} and directions {tuple(directions.shape)}: give (D,) and (d, D) with d "
                "from 0 to D - 1."
            )
        self.in_features = self.out_features = len(mean)
        self._keep(mean=mean, directions=directions)

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
        if known := whole_dimension(model):
            check_count("removed", removed, 0, known - 1, _REMOVED)
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
        check_count("removed", removed, 0, size - 1, _REMOVED)
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


_REMOVED = "the principal directions to remove"
