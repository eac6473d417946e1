"""A projection of token vectors to fewer dimensions, without training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from .embedding_transforms import EmbeddingTransform, check_count, check_rows
from .moments import Moments, in_chunks, principal_directions

_WHAT = "the principal directions to keep"


class TokenProjection(EmbeddingTransform):
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

    MAPPED = "token_embeddings"

    mean: Tensor
    directions: Tensor

    def __init__(self, mean: Tensor, directions: Tensor) -> None:
        check_rows(mean, directions, "directions", fewest=1)
        super().__init__(mean=mean, directions=directions)
        self.out_features, self.in_features = directions.shape

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

    def _transform(self, vectors: Tensor) -> Tensor:
        return linear(vectors - self.mean.to(vectors.dtype), self.directions.to(vectors.dtype))

    def _text_by_text(self, vectors: Tensor, features: dict[str, Any]) -> Tensor:
        """Each text's own rows, and no padding."""
        projected = vectors.new_zeros(*vectors.shape[:2], self.out_features)
        for own, text, real in zip(projected, vectors, features["attention_mask"].bool(), strict=True):
            own[real] = self._transform(text[real])
        return projected
