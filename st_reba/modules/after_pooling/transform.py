"""What the modules after ``Pooling`` share: a fixed map of sentence embeddings, kept as weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..readout import ONE_BY_ONE
from ..stored import FixedWeights
from .moments import Moments

#: Deviations below this share of a dimension's mean are rounding of the embeddings.
ROUNDING = 10 * torch.finfo(torch.float32).eps


class EmbeddingTransform(FixedWeights):
    """Base of the modules that map ``sentence_embedding`` (B, D) to (B, k), after ``Pooling`` and before ``Normalize``.

    The weights are buffers: they are saved and move with the model, gradients pass through them, and training leaves
    them as they are. A zero vector, which is how a text without tokens is embedded, stays one.
    """

    SIZES = ("in_features", "out_features")
    config_keys: list[str] = [*SIZES]

    in_features: int
    out_features: int

    def _transform(self, embedding: Tensor) -> Tensor:
        """The map: (B, D) to (B, k), float32 or float64."""
        raise NotImplementedError

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Map each sentence embedding.

        Args:
            features: With ``sentence_embedding`` (B, D).
            **kwargs: Not used.

        Returns:
            The features with ``sentence_embedding`` (B, k), in the precision that it had.

        Raises:
            ValueError: If the embeddings have another D than the weights.
        """
        embedding: Tensor = features["sentence_embedding"]
        if embedding.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__} maps embeddings of {self.in_features} values and was given "
                f"{embedding.shape[-1]}: put it right behind the modules that it was made for."
            )
        wide = embedding.to(torch.promote_types(embedding.dtype, torch.float32))
        if features.get(ONE_BY_ONE):
            # How a matrix product rounds depends on how many rows it has.
            mapped = torch.cat([self._transform(row) for row in wide.split(1)])
        else:
            mapped = self._transform(wide)
        empty = ~embedding.any(dim=-1, keepdim=True)
        return {**features, "sentence_embedding": mapped.masked_fill(empty, 0).to(embedding.dtype)}

    def get_embedding_dimension(self) -> int:
        """k."""
        return self.out_features


def check_count(name: str, value: int | None, least: int, most: int, what: str) -> None:
    """Refuse what is not a whole number in a range, or None."""
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise ValueError(f"{name}={value!r}: give {what}, a whole number from {least} to {most}.")


def check_shrinkage(value: float, usual: float, *, plain: bool) -> None:
    """Refuse what cannot be added to the variance of each direction.

    Args:
        value: As a share of the mean variance.
        usual: For the message.
        plain: Whether 0 is allowed, which is plain whitening.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (0 < value < math.inf or (plain and value == 0)):
        allowed, ending = ("a number, 0 or more", ", and 0 is plain whitening") if plain else ("a number above 0", "")
        raise ValueError(
            f"shrinkage={value!r}: give {allowed}: what is added to the variance of each direction, as a share of "
            f"their mean. {usual:g} is usual{ending}."
        )


def check_that_they_vary(moments: Moments) -> None:
    """Refuse embeddings that are all one, to rounding, or none at all: nothing can be fitted on them."""
    rounding = torch.finfo(torch.float32).eps * moments.mean.norm()
    if moments.count < 2 or moments.covariance.trace() <= rounding**2:
        raise ValueError(
            f"{moments.count} texts were given, and their embeddings do not differ: give two texts or more that do, "
            "and better some hundreds."
        )
