"""What the modules after ``Pooling`` share: a fixed map of sentence embeddings, kept as weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .stored import StoredModule, check_magnitudes

if TYPE_CHECKING:
    from typing_extensions import Self


class EmbeddingTransform(StoredModule):
    """Base of the modules that map ``sentence_embedding`` (B, D) to (B, k), after ``Pooling`` and before ``Normalize``.

    The weights are buffers: they are saved and move with the model, gradients pass through them, and training leaves
    them as they are. A subclass is made from its weights, and from nothing that ``config.json`` alone could say.
    A zero vector, which is how a text without tokens is embedded, stays one.
    """

    config_keys: list[str] = ["in_features", "out_features"]

    in_features: int
    out_features: int

    def _keep(self, **weights: Tensor) -> None:
        """Take the weights, float32, as buffers of these names.

        Raises:
            ValueError: If one of them is not a tensor of numbers that float32 can be multiplied by.
        """
        check_magnitudes(weights, type(self).__name__)
        for name, weight in weights.items():
            self.register_buffer(name, weight.detach().to(torch.float32, copy=True).contiguous())

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
        mapped = self._transform(embedding.to(torch.promote_types(embedding.dtype, torch.float32)))
        empty = ~embedding.any(dim=-1, keepdim=True)
        return {**features, "sentence_embedding": mapped.masked_fill(empty, 0).to(embedding.dtype)}

    def get_embedding_dimension(self) -> int:
        """k."""
        return self.out_features

    @classmethod
    def _restored(cls, model_name_or_path: str, where: dict[str, Any]) -> Self:
        place = f"{model_name_or_path}/{where['subfolder']}"
        settings = cls._settings(model_name_or_path, where)
        weights = cls._weights(model_name_or_path, where)
        sizes = {name: settings.pop(name, None) for name in EmbeddingTransform.config_keys}
        try:
            module = cls(**settings, **weights)
        except TypeError as error:
            raise ValueError(f"{place} is not a saved {cls.__name__}: {error}.") from error
        found = {name: getattr(module, name) for name in sizes}
        if sizes != found:
            raise ValueError(
                f"{place}: config.json says {sizes} and the weights {found}. They are of two "
                "modules; save the model again."
            )
        return module


def check_count(name: str, value: int | None, least: int, most: int, what: str) -> None:
    """Refuse what is not a whole number in a range, or None."""
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise ValueError(f"{name}={value!r}: give {what}, a whole number from {least} to {most}.")
