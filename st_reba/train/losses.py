"""Losses of the papers' trained methods, for sentence-transformers' own trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from sentence_transformers.util import pairwise_cos_sim
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import cosine_similarity, cross_entropy, mse_loss, normalize

from ..modules import LayerwiseAutoencoder, TwinTower

__all__ = [
    "EmbeddingCoSENTLoss",
    "InteractionInfoNCELoss",
    "JTCSELoss",
    "LogResidualVarianceLoss",
    "PairScoreMSELoss",
    "ReconstructionLoss",
]

#: Of EmbeddingCoSENTLoss; chosen on STS-B's development part, with 1,000 labelled pairs and SmolLM2-135M.
COSENT_SCALE = 5.0


class ReconstructionLoss(nn.Module):
    r"""How far each layer's decoded state is from the state, with its mean and variance normalised.

    .. math:: \mathcal{L} = \frac{1}{L B D} \sum_l \sum_b \lVert g_l(f_l(z_{bl})) - \mathrm{norm}(z_{bl}) \rVert^2

    (FREEZE, section 4.2.3.) The layers share no weights, so each learns as if it were alone.

    Args:
        model: A model that ends in :class:`st_reba.modules.LayerwiseAutoencoder`, with decoders.

    Inputs: one column of texts, or several; labels are not looked at.

    Raises:
        ValueError: If the model ends in another module, or has no decoders.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        last = model[-1]
        if not isinstance(last, LayerwiseAutoencoder) or not last.decoders:
            raise ValueError(
                f"The model ends in {type(last).__name__}, which has no decoders: reconstruction is learnt by a "
                "LayerwiseAutoencoder with decoders=True."
            )
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch of texts."""
        # Of texts whose states are at hand, the embedding is not needed.
        read = [column if "layer_states" in column else self.model(column) for column in sentence_features]
        autoencoder: Any = getattr(self.model, "module", self.model)[-1]
        return autoencoder.reconstruction_errors(torch.cat([column["layer_states"] for column in read])).mean()


class _PairScoreLoss(nn.Module):
    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """Return the loss of a batch of pairs: ``sentence_features`` of both sides, ``labels`` (B,)."""
        return self.compute_loss_from_scores(pair_scores(self.model, sentence_features), labels)

    def compute_loss_from_scores(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of (B,) predictions beside (B,) labels."""
        raise NotImplementedError


class LogResidualVarianceLoss(_PairScoreLoss):
    r"""The log of the variance, over a batch, of what predictions and labels differ by.

    .. math:: \mathcal{L} = \log\left(\mathrm{Var}(\hat{y} - y) + \varepsilon\right), \quad
        \mathrm{Var}(r) = \frac{1}{B} \sum_b (r_b - \bar{r})^2

    (FREEZE, section 4.1.1.) The mean squared error is variance plus squared bias of the residuals; this asks for the
    variance alone, and so for what a correlation measures. The log makes the gradient relative: as steep when the
    variance is small as when it is large.

    What the paper leaves open, and what is done here:

    - *The bias.* A constant offset costs nothing: predictions may settle beside the labels, though not far, since both
      lie between 0 and 1. The paper saw them centre by themselves. Where the numbers matter and not their order, use
      :class:`PairScoreMSELoss`.
    - *Which variance.* That of the batch, divided by B; B - 1 would add a constant to the loss and nothing to its
      gradient. A batch of one pair has no variance, and no gradient.
    - *A variance of zero* has no log. :math:`\varepsilon = 10^{-6}`, the variance of similarities that are right to
      0.001, bounds the loss from below, and the gradient.
    - *The batch.* The loss of a batch is not a mean over its pairs: gradients accumulated over small batches are not
      those of a large one.

    Args:
        model: A model that ends in :class:`st_reba.modules.LayerwiseAutoencoder`, whose similarity is trained; or any
            other, whose cosine is.

    Inputs: pairs of texts and a label, the similarity from 0 to 1.
    """

    def compute_loss_from_scores(self, predictions: Tensor, labels: Tensor) -> Tensor:
        return torch.log((predictions - labels.to(predictions.dtype)).var(correction=0) + 1e-6)


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

    def __init__(self, model: Any, scale: float = COSENT_SCALE) -> None:
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


class PairScoreMSELoss(_PairScoreLoss):
    r"""The mean squared error of a model's similarity: FREEZE's first loss, for all but its last model.

    .. math:: \mathcal{L} = \frac{1}{B} \sum_b (\hat{y}_b - y_b)^2

    Args:
        model: As for :class:`LogResidualVarianceLoss`.

    Inputs: pairs of texts and a label, the similarity from 0 to 1.
    """

    def compute_loss_from_scores(self, predictions: Tensor, labels: Tensor) -> Tensor:
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


def info_nce(anchors: Tensor, positives: Tensor, temperature: float) -> Tensor:
    r"""Return InfoNCE: each text's anchor shall be nearer to its own positive than to those of the other texts.

    .. math::
        L(h, h^+) = -\frac{1}{B} \sum_i \log
        \frac{e^{\cos(h_i, h_i^+) / \tau}}{\sum_j e^{\cos(h_i, h_j^+) / \tau}}

    (SimCSE; JTCSE, Equation 11.)

    Args:
        anchors: (B, D), of any length.
        positives: (B, D).
        temperature: :math:`\tau`.
    """
    cosines = normalize(anchors, dim=-1) @ normalize(positives, dim=-1).mT
    return cross_entropy(cosines / temperature, torch.arange(len(anchors), device=anchors.device))


class InteractionInfoNCELoss(nn.Module):
    r"""InfoNCE across two towers, whose roles a coin decides in each batch (JTCSE, Equation 12).

    .. math::
        R \sum_{s} L(s_I, s_{II}^+) + (1 - R) \sum_{s} L(s_{II}, s_I^+), \qquad R \in \{0, 1\}

    over the streams s: the towers' own states, and the cross-attention streams where there are any. All streams of a
    batch share one throw. The anchors are one tower's first view of each text, the positives the other tower's second
    view.

    The coin has a generator of its own, so that it takes nothing from the generator of dropout. Its state is part of
    ``state_dict()``, under the name that PyTorch gives to extra state.

    Args:
        temperature: As in :func:`info_nce`.
        seed: Of the coin.
    """

    def __init__(self, temperature: float = 0.05, seed: int = 42) -> None:
        super().__init__()
        self.temperature, self.seed = temperature, seed
        self.coin = torch.Generator().manual_seed(seed)

    def forward(self, *streams: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a batch, a scalar.

        Args:
            *streams: Of each stream, the first and the second view of the batch, (B, 2, D) each: tower I, tower II.
        """
        anchor = int(torch.randint(2, (1,), generator=self.coin))
        losses = [info_nce(first[:, anchor], second[:, 1 - anchor], self.temperature) for first, second in streams]
        return torch.stack(losses).sum()

    def get_extra_state(self) -> Tensor:
        return self.coin.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        self.coin.set_state(state.cpu())


def tensor_modulus(
    first: Tensor, second: Tensor, first_pooled: Tensor, second_pooled: Tensor, least_cosine: float
) -> Tensor:
    r"""Return the tensor modulus constraint between two towers, both ways (JTCSE, Equations 13 and 14).

    .. math::
        L(i, j) = -\log \max(\cos(h_i, h_j^+), c) \cdot
        \frac{\lVert p_i - p_j^+ \rVert}{\lVert p_i \rVert + \lVert p_j^+ \rVert},
        \qquad L = L(I, II) + L(II, I)

    with h the last hidden state of CLS and p the pooler output, which, unlike h, no layer norm has brought to one
    length.

    Args:
        first: CLS of the first view of each text, (B, 2, D): tower I, tower II.
        second: Of the second view.
        first_pooled: The pooler outputs of the first view, (B, 2, D).
        second_pooled: Of the second view.
        least_cosine: c; of smaller cosines the logarithm is not defined, or too steep to learn from.
    """
    # Tower I beside tower II, and tower II beside tower I.
    second, second_pooled = second.flip(1), second_pooled.flip(1)
    cosines = cosine_similarity(first, second, dim=-1).clamp_min(least_cosine)
    lengths = vector_norm(first_pooled, dim=-1) + vector_norm(second_pooled, dim=-1)
    apart = vector_norm(first_pooled - second_pooled, dim=-1) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
    return (-cosines.log() * apart).sum(dim=1).mean()


class JTCSELoss(nn.Module):
    r"""The sum of JTCSE's three terms, each with its weight (Equation 15), for a :class:`st_reba.modules.TwinTower`.

    .. math::
        L = \sum_{i \in \{I, II\}} L_{NCE}(h_i, h_i^+) + L_{ICNCE} + L_{ICTM}

    A row of the data is one text, which runs through each tower twice: dropout makes two views of it. With two texts a
    row, such as a sentence and its round-trip translation, these are the views. A weight of 0 leaves its term out, as
    in the paper's ablations (Table X).

    Args:
        model: Its first module is a ``TwinTower``.
        temperature: :math:`\tau` of both contrastive terms.
        info_nce_weight: Of InfoNCE within each tower: :func:`info_nce`.
        interaction_weight: Of InfoNCE across the towers, on their own states and on the cross-attention streams:
            :class:`InteractionInfoNCELoss`.
        modulus_weight: Of the tensor modulus constraint: :func:`tensor_modulus`.
        least_cosine: As in :func:`tensor_modulus`.
        seed: Of the coin in :class:`InteractionInfoNCELoss`.

    Raises:
        ValueError: If the model has no twin tower, or the weights are not numbers of 0 or more, one of them greater.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        temperature: float = 0.05,
        info_nce_weight: float = 1.0,
        interaction_weight: float = 1.0,
        modulus_weight: float = 1.0,
        least_cosine: float = 1e-4,
        seed: int = 42,
    ) -> None:
        super().__init__()
        if not isinstance(model[0], TwinTower):
            raise ValueError(
                f"JTCSELoss compares two towers, and the model's first module is {type(model[0]).__name__}: "
                "use a TwinTower."
            )
        self.model = model
        self.weights = {"info_nce": info_nce_weight, "interaction": interaction_weight, "modulus": modulus_weight}
        if not all(0 <= weight < math.inf for weight in self.weights.values()) or not any(self.weights.values()):
            raise ValueError(
                f"The weights {self.weights}: give numbers of 0 or more, one of them greater than 0; 1 is usual."
            )
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature!r}: give a number greater than 0; 0.05 is usual.")
        if not 0 < least_cosine < 1:
            raise ValueError(f"least_cosine={least_cosine!r}: give a number between 0 and 1; 1e-4 is the paper's.")
        self.temperature, self.least_cosine = temperature, least_cosine
        self.interaction = InteractionInfoNCELoss(temperature, seed)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> dict[str, Tensor]:
        """The weighted terms of a batch, scalars, which ST's trainer sums and logs one by one.

        Args:
            sentence_features: One column of texts, or two.
            labels: Unused.

        Raises:
            ValueError: If there are more columns.
        """
        first, second = self._views(list(sentence_features))
        # First and second view, (B, 2, D) each; without cross-attention there is no cross stream.
        views = {name: (first[name], second[name]) for name in first}
        terms: dict[str, Tensor] = {}
        if self.weights["info_nce"]:
            one, other = views["cls_states"]
            terms["info_nce"] = torch.stack([info_nce(one[:, i], other[:, i], self.temperature) for i in (0, 1)]).sum()
        if self.weights["interaction"]:
            terms["interaction"] = self.interaction(
                *(views[name] for name in ("cls_states", "cross_states") if name in views)
            )
        if self.weights["modulus"]:
            terms["modulus"] = tensor_modulus(*views["cls_states"], *views["pooler_outputs"], self.least_cosine)
        return {name: self.weights[name] * term for name, term in terms.items()}

    def _views(self, columns: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
        """What the losses look at, of the first and of the second view."""
        if len(columns) == 2:
            return [self._read(column) for column in columns]
        if len(columns) != 1:
            raise ValueError(
                f"The data has {len(columns)} columns of text: JTCSELoss takes one, or two with two versions of each "
                "text."
            )
        # Both views in one pass; dropout falls on each row by itself.
        twice = {
            name: torch.cat([value, value]) if isinstance(value, Tensor) else value
            for name, value in columns[0].items()
        }
        halves = {name: output.chunk(2) for name, output in self._read(twice).items()}
        return [{name: half[i] for name, half in halves.items()} for i in (0, 1)]

    def _read(self, features: dict[str, Any]) -> dict[str, Tensor]:
        outputs = self.model(features, tower_outputs=True, cross_stream=self.weights["interaction"] > 0)
        read = ("cls_states", "pooler_outputs", "cross_states")
        return {name: outputs[name] for name in read if name in outputs}

    def get_config_dict(self) -> dict[str, Any]:
        """For the model card."""
        return {
            "temperature": self.temperature,
            **{f"{name}_weight": weight for name, weight in self.weights.items()},
            "least_cosine": self.least_cosine,
            "seed": self.interaction.seed,
        }
