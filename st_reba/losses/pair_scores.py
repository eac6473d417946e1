"""The similarity that a model gives to pairs of texts, and the plain loss of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.util import pairwise_cos_sim
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ..modules.trained.layerwise_autoencoder import LayerwiseAutoencoder


class PairScoreMSELoss(nn.Module):
    r"""The mean squared error of a model's similarity: FREEZE's first loss, for all but its last model.

    .. math:: \mathcal{L} = \frac{1}{B} \sum_b (\hat{y}_b - y_b)^2

    Args:
        model: As for :class:`LogResidualVarianceLoss`.

    Inputs: pairs of texts and a label, the similarity from 0 to 1.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """The loss of a batch of pairs: ``sentence_features`` of both sides, ``labels`` (B,)."""
        predictions = pair_scores(self.model, sentence_features)
        return mse_loss(predictions, labels.to(predictions.dtype))


def pair_scores(model: Any, sentence_features: Iterable[dict[str, Any]]) -> Tensor:
    """(B,): a model's similarity of the texts of two columns, with gradients.

    Raises:
        ValueError: If there are not two columns.
    """
    first, second = (model(column)["sentence_embedding"] for column in columns_of_pairs(sentence_features))
    last = getattr(model, "module", model)[-1]
    if isinstance(last, LayerwiseAutoencoder):
        return last.scores(first, second)
    return pairwise_cos_sim(first, second)


def columns_of_pairs(sentence_features: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The two columns of a batch.

    Raises:
        ValueError: If there are not two.
    """
    features = list(sentence_features)
    if len(features) != 2:
        raise ValueError(
            f"{len(features)} columns of texts were given: a similarity is one of two. Select two text columns and the "
            "label of the dataset."
        )
    return features
