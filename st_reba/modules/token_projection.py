"""A projection of token vectors to fewer dimensions, without training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .embedding_transforms import check_count
from .moments import Moments, in_chunks, principal_directions
from .readout import ONE_BY_ONE
from .stored import FixedWeights

_WHAT = "the principal directions to keep"


class TokenProjection(FixedWeights):
    r"""Gives each token's vector its coordinates in the k principal directions of a collection's token vectors.

    .. math:: e'_i = U_k (e_i - \mu), \qquad \Sigma = U^\top \Lambda U

    with mean :math:`\mu` and covariance :math:`\Sigma` of the vectors of the collection's tokens: what ColBERT's linear
    layer is trained to do, by PCA. A vector of zeros, which is how a text without tokens is embedded, stays one.

    Stands before ``MultiVectorMask`` in a ``MultiVectorEncoder``, between two ``Normalize("token_embeddings")``. Where
    the module in front is ``deterministic``, so is this, which ST's ``Dense`` is not.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).
        directions: (k, D), orthonormal rows.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    SIZES = ("in_features", "out_features")
    config_keys: list[str] = [*SIZES]

    mean: Tensor
    directions: Tensor

    def __init__(self, mean: Tensor, directions: Tensor) -> None:
        super().__init__()
        if (
            directions.ndim != 2
            or not 1 <= len(directions) <= directions.shape[1]
            or mean.shape != directions.shape[1:]
        ):
            raise ValueError(
                f"mean is {tuple(mean.shape)} and directions {tuple(directions.shape)}: give (D,) and (k, D) with k "
                "from 1 to D."
            )
        self.out_features, self.in_features = directions.shape
        self._keep(mean=mean, directions=directions)

    @classmethod
    def fit(
        cls, model: Any, texts: Iterable[str], *, dimension: int, chunk_size: int = 1024, **encode_kwargs: Any
    ) -> TokenProjection:
        """Fit on the vectors that a model gives the tokens of texts, in one pass: they are never held together.

        Args:
            model: A ``MultiVectorEncoder`` without a projection, whose ``encode_document`` gives the vectors: those of
                tokens that its mask leaves out do not count.
            texts: Any iterable of strings; no labels are needed. Some hundreds are enough.
            dimension: k, the directions to keep, those of largest variance.
            chunk_size: How many texts are encoded at a time.
            **encode_kwargs: For ``model.encode_document``: ``batch_size``, ``prompt`` and so on.

        Raises:
            ValueError: If ``texts`` is a string or has no tokens, a setting is out of range, or the tokens are too few.
        """
        check_count("dimension", dimension, 1, model.get_embedding_dimension(), _WHAT)
        settings = {"show_progress_bar": False, **encode_kwargs}
        moments = Moments(model.get_embedding_dimension())
        for chunk in in_chunks(texts, chunk_size):
            for vectors in model.encode_document(chunk, **settings):
                moments.add(vectors[vectors.any(dim=1)])
        return cls.from_moments(moments, dimension=dimension)

    @classmethod
    def from_moments(cls, moments: Moments, *, dimension: int) -> TokenProjection:
        """Fit on the mean and covariance of token vectors.

        Args:
            moments: Of token vectors (D,).
            dimension: k, as for :meth:`fit`.

        Raises:
            ValueError: If ``dimension`` is out of range, or there were too few vectors.
        """
        check_count("dimension", dimension, 1, len(moments.mean), _WHAT)
        if moments.count <= dimension:
            raise ValueError(
                f"{moments.count} tokens vary in at most {max(0, moments.count - 1)} directions, and {dimension} are "
                "to be kept: give more texts, or a lower dimension."
            )
        _, directions = principal_directions(moments.covariance)
        return cls(moments.mean, directions[:dimension])

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Project each token's vector.

        Args:
            features: With ``token_embeddings`` (B, n, D), and ``attention_mask`` (B, n) to match.
            **kwargs: Not used.

        Returns:
            The features with ``token_embeddings`` (B, n, k), in the precision that they had.

        Raises:
            ValueError: If the vectors have another D than the weights.
        """
        states: Tensor = features["token_embeddings"]
        if states.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__} maps vectors of {self.in_features} values and was given {states.shape[-1]}: "
                "put it right behind the modules that it was made for."
            )
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        if features.get(ONE_BY_ONE):
            # How a matrix product rounds depends on how many rows it has: each text's own, and no padding.
            projected = wide.new_zeros(*wide.shape[:2], self.out_features)
            for own, text, real in zip(projected, wide, features["attention_mask"].bool(), strict=True):
                own[real] = self._projected(text[real])
        else:
            projected = self._projected(wide)
        nothing = ~states.any(dim=-1, keepdim=True)
        return {**features, "token_embeddings": projected.masked_fill(nothing, 0).to(states.dtype)}

    def _projected(self, vectors: Tensor) -> Tensor:
        return linear(vectors - self.mean.to(vectors.dtype), self.directions.to(vectors.dtype))

    def get_embedding_dimension(self) -> int:
        """k."""
        return self.out_features
