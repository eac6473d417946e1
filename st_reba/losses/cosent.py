"""CoSENT on the embedding, for models that have a similarity of their own as well."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from torch import Tensor
from torch.nn.functional import mse_loss

from ..modules.trained.layerwise_autoencoder import LayerwiseAutoencoder
from .pair_scores import columns_of_pairs

#: Chosen on STS-B's development part, with 1,000 labelled pairs and SmolLM2-135M.
SCALE = 5.0


class EmbeddingCoSENTLoss(CoSENTLoss):
    r"""ST's ``CoSENTLoss`` on the plain cosine of the embeddings, which is what a vector store sees.

    .. math:: \mathcal{L} = \log\Bigl(1 + \sum_{y_i > y_j} e^{\lambda (\cos_j - \cos_i)}\Bigr)
        + \frac{1}{B} \sum_b \bigl(\hat{y}_b - y_b\bigr)^2

    The second term is there where the model ends in :class:`st_reba.modules.LayerwiseAutoencoder`: it trains that
    module's similarity :math:`\hat{y}` on embeddings that it leaves as they are, so that the first term alone decides
    them.

    Args:
        model: Any.
        scale: :math:`\lambda`, by which cosines are multiplied. With ST's 20 the pairs that stand most
            wrongly count alone, which harmed an embedding that was good before training.

    Inputs: pairs of texts and a label, the similarity from 0 to 1.
    """

    def __init__(self, model: Any, scale: float = SCALE) -> None:
        super().__init__(model, scale=scale)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """The loss of a batch of pairs: ``sentence_features`` of both sides, ``labels`` (B,)."""
        model: Any = self.model
        embeddings = [model(column)["sentence_embedding"] for column in columns_of_pairs(sentence_features)]
        loss: Tensor = self.compute_loss_from_embeddings(embeddings, labels)
        last = getattr(model, "module", model)[-1]
        if isinstance(last, LayerwiseAutoencoder):
            first, second = (embedding.detach() for embedding in embeddings)
            loss = loss + mse_loss(last.scores(first, second), labels.to(first.dtype))
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        """For the model card."""
        return {"scale": self.scale}
