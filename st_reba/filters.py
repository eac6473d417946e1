"""What can stand after the pooling of a training-free recipe, by the name that it adds to the recipe's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sentence_transformers import SentenceTransformer
from torch import nn

from .modules import AllButTheTop, EmbeddingFilter, WhiteningTransform
from .moments import Moments, embedding_moments

#: Texts that whitening wants for each direction that it keeps: directions that a few texts vary in by chance alone
#: would be blown up to the size of all others.
TEXTS_A_DIRECTION = 4

#: Read from the language model's head, without any text.
HEAD_FILTER = "filtered"
FILTERS = (HEAD_FILTER, "whitened", "all but the top")


def fitted(name: str, moments: Moments) -> nn.Module:
    """One of :data:`FILTERS` that is fitted on embeddings.

    Args:
        name: Which.
        moments: Of the embeddings of plain texts.

    Raises:
        ValueError: If there are too few texts.
    """
    if name == "whitened":
        kept = max(1, moments.count // TEXTS_A_DIRECTION)
        return WhiteningTransform.from_moments(moments, dimension=kept if kept < len(moments.mean) else None)
    return AllButTheTop.from_moments(moments)


@dataclass(frozen=True)
class Filter:
    """How to make what shall stand behind a model that ends in its pooling.

    Attributes:
        name: One of :data:`FILTERS`.
        texts: What it is fitted on; none for that of the head.
    """

    name: str
    texts: tuple[str, ...] = ()

    def __call__(self, model: SentenceTransformer, batch_size: int = 32) -> nn.Module:
        """Make it.

        Args:
            model: Ends in its pooling.
            batch_size: Texts at a time.

        Raises:
            ValueError: If there are too few texts, or the model has no head.
        """
        if self.name == HEAD_FILTER:
            return EmbeddingFilter.from_language_model(model)
        return fitted(self.name, embedding_moments(model, self.texts, batch_size=batch_size))


def fitted_on(texts: Sequence[str]) -> dict[str, Filter]:
    """All of :data:`FILTERS`, those that are fitted on these texts."""
    return {name: Filter(name, () if name == HEAD_FILTER else tuple(texts)) for name in FILTERS}
