"""What can stand around the pooling of a training-free recipe, by the name that it adds to the recipe's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from sentence_transformers import SentenceTransformer
from torch import nn

from ..base import CausalModule
from ..embedding_filter import EmbeddingFilter
from ..embedding_transforms import SHRINKAGE, AllButTheTop, Centering, Standardization, WhiteningTransform
from ..idf_weights import IdfWeights
from ..moments import Moments, embedding_moments
from ..partwise_whitening import SHRINKAGE as PARTWISE_SHRINKAGE
from ..partwise_whitening import PartwiseWhitening

#: Read from the language model's head, without any text.
HEAD_FILTER = "filtered"

#: Those that are fitted on the mean and covariance of embeddings, by name.
_FITTED: dict[str, Callable[[Moments], nn.Module]] = {
    "centred": Centering.from_moments,
    "standardised": Standardization.from_moments,
    "whitened": WhiteningTransform.from_moments,
    "all but the top": AllButTheTop.from_moments,
}

#: What can stand after the pooling of any recipe.
FILTERS = (HEAD_FILTER, *_FITTED)

#: What stands behind a recipe whose vectors are made of parts, and behind its controls.
PARTWISE = "partwise whitened"

#: What can stand before it.
IDF = "idf-weighted"


def fitted(name: str, moments: Moments) -> nn.Module:
    """One of :data:`FILTERS` that is fitted on embeddings.

    Args:
        name: Which.
        moments: Of the embeddings of plain texts.

    Raises:
        ValueError: If there are too few texts, or they are too much alike.
    """
    return _FITTED[name](moments)


@dataclass(frozen=True)
class Filter:
    """How to make what shall stand behind a model that ends in its pooling.

    Attributes:
        name: One of :data:`FILTERS`, or :data:`PARTWISE`.
        texts: What it is fitted on; none for that of the head.
    """

    name: str
    texts: tuple[str, ...] = ()

    def settings(self, module: CausalModule) -> dict[str, object]:
        """What it is fitted with behind a module, besides the texts."""
        if self.name == PARTWISE:
            return {"shrinkage": PARTWISE_SHRINKAGE, "shares": module.SHARES}
        return {"shrinkage": SHRINKAGE} if self.name == "whitened" else {}

    def __call__(self, model: SentenceTransformer, batch_size: int = 32) -> nn.Module:
        """Make it.

        Args:
            model: Begins with a module of st_reba's, and ends in its pooling.
            batch_size: Texts at a time.

        Raises:
            ValueError: If there are too few texts, or the model has no head.
        """
        if self.name == HEAD_FILTER:
            return EmbeddingFilter.from_language_model(model)
        shares = cast(CausalModule, model[0]).SHARES
        return self.from_moments(embedding_moments(model, self.texts, batch_size=batch_size), shares)

    def from_moments(self, moments: Moments, shares: Sequence[float]) -> nn.Module:
        """Make one that is fitted, on embeddings that were seen elsewhere.

        Args:
            moments: Of the embeddings of :attr:`texts`.
            shares: How much each of their parts counts.

        Raises:
            ValueError: If there are too few texts.
        """
        if self.name == PARTWISE:
            return PartwiseWhitening.from_moments(moments, shares=shares)
        return fitted(self.name, moments)


@dataclass(frozen=True)
class Weighting:
    """How to make the weights of tokens that stand between a module and its pooling: :class:`IdfWeights`.

    Attributes:
        texts: What it is fitted on.
    """

    texts: tuple[str, ...]

    def __call__(self, module: CausalModule) -> IdfWeights:
        """Make it for a module, whose language model is not run.

        Raises:
            ValueError: If the texts have no tokens, or the module hands on one token alone.
        """
        return IdfWeights.fit(module, self.texts)
