"""What can stand around the pooling of a recipe, by the name that it adds to the recipe's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from sentence_transformers import SentenceTransformer
from torch import nn

from .. import modules
from ..modules.embedding_transforms import SHRINKAGE
from ..modules.moments import Moments, embedding_moments
from ..modules.partwise import SHRINKAGE as PARTWISE_SHRINKAGE

#: Poolings as the papers call them, and as ST does.
POOLINGS = {"mean": "mean", "last": "lasttoken"}


@dataclass(frozen=True)
class Part:
    """A filter behind the pooling of any recipe, or weights of tokens before it.

    Attributes:
        name: As tables show it.
        says: What it does, without a full stop.
        module: Its class.
        poolings: Those that it can stand around.
        enough: How many texts, at most, it is fitted on: it gains nothing from more. None: it gains from all.
    """

    name: str
    says: str
    module: type[Any]
    poolings: tuple[str, ...] = tuple(POOLINGS)
    enough: int | None = None

    @property
    def key(self) -> str:
        """As people type it behind a recipe's key: ``classical+all-but-the-top``."""
        return self.name.replace(" ", "-")

    @property
    def fitted(self) -> bool:
        """Whether it is fitted on plain texts; the other is computed from the language model's head."""
        return self.module is not modules.EmbeddingFilter

    @property
    def weighs_tokens(self) -> bool:
        """Whether it stands before the pooling."""
        return self.module is modules.IdfWeights

    @property
    def needs_covariance(self) -> bool:
        """Whether it is fitted on more than mean and variances."""
        return self.module is not modules.StandardizedSum

    def drawn(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Those of these texts that it is fitted on: all, or some, evenly drawn."""
        if self.enough is None or len(texts) <= self.enough:
            return tuple(texts)
        return tuple(texts[number * len(texts) // self.enough] for number in range(self.enough))

    def settings(self, shares: Sequence[float]) -> dict[str, Any]:
        """What a filter is fitted with, besides texts.

        Args:
            shares: How much each part of the vectors counts: ``shares`` of the module that gives them.
        """
        if self.module is modules.PartwiseWhitening:
            return {"shrinkage": PARTWISE_SHRINKAGE, "shares": shares}
        if self.module is modules.StandardizedSum:
            return {"shares": shares}
        return {"shrinkage": SHRINKAGE} if self.module is modules.WhiteningTransform else {}

    def from_moments(self, moments: Moments, shares: Sequence[float] = modules.CausalModule.shares) -> nn.Module:
        """A filter that is fitted, on embeddings that were seen elsewhere.

        Args:
            moments: Of the embeddings of plain texts.
            shares: As for :meth:`settings`.

        Raises:
            ValueError: If there are too few texts, or they are too much alike.
        """
        return cast(nn.Module, self.module.from_moments(moments, **self.settings(shares)))

    def made(self, model: SentenceTransformer, texts: Sequence[str]) -> nn.Module:
        """A filter for a model that begins with a module of st_reba's and ends in its pooling.

        Raises:
            ValueError: If there are too few texts, or the model has no head.
        """
        if not self.fitted:
            return modules.EmbeddingFilter.from_language_model(model)
        moments = embedding_moments(model, self.drawn(texts), covariance=self.needs_covariance)
        return self.from_moments(moments, cast(modules.CausalModule, model[0]).shares)


#: What stands behind a recipe whose vectors are made of parts, and behind its controls.
PARTWISE = "partwise whitened"
#: What stands behind a recipe whose parts are added, and behind its controls.
SUM = "standardised sum"
#: What stands before a pooling.
IDF = "idf-weighted"

# fmt: off
#: All there are, by name.
PARTS = {
    part.name: part
    for part in (
        Part("filtered",
            "without the directions that frequent tokens are written in, as the model's head shows them",
            modules.EmbeddingFilter),
        Part("centred", "less the mean of a sample of plain texts", modules.Centering),
        Part("standardised",
            "each dimension with mean 0 and standard deviation 1 over a sample of plain texts",
            modules.Standardization),
        Part("whitened",
            "the principal directions of a sample of plain texts, scaled to nearly one variance",
            modules.WhiteningTransform),
        Part("all but the top",
            "less the mean of a sample of plain texts and the directions in which they vary most",
            modules.AllButTheTop),
        Part(PARTWISE,
            "each part standardised, a little whitened over a sample of plain texts, and given its share",
            modules.PartwiseWhitening),
        Part(SUM,
            "each part standardised over a sample of plain texts and scaled to one length, and their sum taken",
            modules.StandardizedSum, enough=200),
        Part(IDF, "each token counts by how few of a sample of plain texts have it", modules.IdfWeights, ("mean",)),
    )
}
# fmt: on

#: What can stand behind the pooling of any recipe.
FILTERS = tuple(name for name in PARTS if name not in (PARTWISE, SUM, IDF))
