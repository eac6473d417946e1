"""Losses of the papers' trained methods, for the trainer of sentence-transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from pydantic import Field, validate_call
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from sentence_transformers.util import pairwise_cos_sim
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import cosine_similarity, cross_entropy, mse_loss, normalize

from ..modules import LayerwiseAutoencoder, TwinTower
from .settings import STRICT, NotNegative, Positive

#: Scale of EmbeddingCoSENTLoss, chosen on the development set of STS-B with 1,000 labelled pairs and SmolLM2-135M.
COSENT_SCALE = 5.0


class ReconstructionLoss(nn.Module):
    r"""Mean squared error of each layer's decoded state, against the state normalized to zero mean and unit variance.

    .. math:: \mathcal{L} = \frac{1}{L B D} \sum_l \sum_b \lVert g_l(f_l(z_{bl})) - \mathrm{norm}(z_{bl}) \rVert^2

    (FREEZE, section 4.2.3.) The layers share no weights, so each is trained independently.

    Args:
        model: A model that ends in :class:`st_reba.modules.LayerwiseAutoencoder`, with decoders.

    Inputs: one column of texts, or several; labels are ignored.

    Raises:
        ValueError: If the model ends in another module, or has no decoders.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        last = model[-1]
        if not isinstance(last, LayerwiseAutoencoder) or not last.decoders:
            problem = f"The model ends in {type(last).__name__}, which has no decoders."
            raise ValueError(f"{problem} ReconstructionLoss needs a LayerwiseAutoencoder with decoders=True.")
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Return the loss of a batch of texts."""
        # Cached states need no forward pass.
        outputs = [column if "layer_states" in column else self.model(column) for column in sentence_features]
        autoencoder: Any = getattr(self.model, "module", self.model)[-1]
        return autoencoder.reconstruction_errors(torch.cat([column["layer_states"] for column in outputs])).mean()


class _PairScoreLoss(nn.Module):
    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """Return the loss of a batch of pairs: ``sentence_features`` of both sides, ``labels`` (B,)."""
        return self.compute_loss_from_scores(pair_scores(self.model, sentence_features), labels)

    def compute_loss_from_scores(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of (B,) predictions against (B,) labels."""
        raise NotImplementedError


class LogResidualVarianceLoss(_PairScoreLoss):
    r"""Log of the variance, over a batch, of the residuals of predictions.

    .. math:: \mathcal{L} = \log\left(\mathrm{Var}(\hat{y} - y) + \varepsilon\right), \quad
        \mathrm{Var}(r) = \frac{1}{B} \sum_b (r_b - \bar{r})^2

    (FREEZE, section 4.1.1.) The mean squared error is the variance plus the squared bias of the residuals. This loss
    has the variance alone, like a correlation. The log makes the gradient relative to the variance.

    Details that the paper leaves open:

    - *Bias.* A constant offset costs nothing, so predictions may be biased. The paper saw no bias. If the values matter
      and not only their order, use :class:`PairScoreMSELoss`.
    - *Variance.* The variance of the batch is divided by B; B - 1 would add a constant to the loss and leave its
      gradient unchanged. A batch of one pair has no variance, and no gradient.
    - *Zero variance* has no log. :math:`\varepsilon = 10^{-6}`, the variance of similarities with an error of 0.001,
      bounds the loss from below, and the gradient.
    - *Batches.* The loss of a batch is not a mean over its pairs: gradients accumulated over small batches differ from
      those of a large batch.

    Args:
        model: A model. Its similarity is trained if it ends in :class:`st_reba.modules.LayerwiseAutoencoder`, else
            its cosine.

    Inputs: pairs of texts and a label, the similarity from 0 to 1.
    """

    def compute_loss_from_scores(self, predictions: Tensor, labels: Tensor) -> Tensor:
        return torch.log((predictions - labels.to(predictions.dtype)).var(correction=0) + 1e-6)


class EmbeddingCoSENTLoss(CoSENTLoss):
    r"""``CoSENTLoss`` on the plain cosine of the embeddings, as used by vector stores.

    .. math:: \mathcal{L} = \log\Bigl(1 + \sum_{y_i > y_j} e^{\lambda (\cos_j - \cos_i)}\Bigr)
        + \frac{1}{B} \sum_b \bigl(\hat{y}_b - y_b\bigr)^2

    The second term applies if the model ends in :class:`st_reba.modules.LayerwiseAutoencoder`. It trains that module's
    similarity :math:`\hat{y}` on detached embeddings, so that the first term alone changes the embeddings.

    Args:
        model: Any model.
        scale: Factor :math:`\lambda` of the cosines. With ST's default of 20 the worst-ordered pairs dominate, which
            harmed an embedding that was good before training.

    Inputs: pairs of texts and a label, the similarity from 0 to 1.
    """

    def __init__(self, model: Any, scale: float = COSENT_SCALE) -> None:
        super().__init__(model, scale=scale)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """Return the loss of a batch of pairs: ``sentence_features`` of both sides, ``labels`` (B,)."""
        model: Any = self.model
        embeddings = _pair_embeddings(model, sentence_features)
        loss: Tensor = self.compute_loss_from_embeddings(embeddings, labels)
        last = getattr(model, "module", model)[-1]
        if isinstance(last, LayerwiseAutoencoder):
            first, second = (embedding.detach() for embedding in embeddings)
            loss = loss + mse_loss(last.scores(first, second), labels.to(first.dtype))
        return loss


class PairScoreMSELoss(_PairScoreLoss):
    r"""Mean squared error of a model's similarity: FREEZE's loss for all models but the last.

    .. math:: \mathcal{L} = \frac{1}{B} \sum_b (\hat{y}_b - y_b)^2

    Args:
        model: As for :class:`LogResidualVarianceLoss`.

    Inputs: pairs of texts and a label, the similarity from 0 to 1.
    """

    def compute_loss_from_scores(self, predictions: Tensor, labels: Tensor) -> Tensor:
        return mse_loss(predictions, labels.to(predictions.dtype))


def pair_scores(model: Any, sentence_features: Iterable[dict[str, Any]]) -> Tensor:
    """Return a model's similarities (B,) of the texts of two columns, with gradients.

    Raises:
        ValueError: If there are not two columns.
    """
    first, second = _pair_embeddings(model, sentence_features)
    last = getattr(model, "module", model)[-1]
    return last.scores(first, second) if isinstance(last, LayerwiseAutoencoder) else pairwise_cos_sim(first, second)


def _pair_embeddings(model: Any, sentence_features: Iterable[dict[str, Any]]) -> list[Tensor]:
    features = list(sentence_features)
    if len(features) != 2:
        problem = f"{len(features)} columns of texts were given, but a similarity needs two."
        raise ValueError(f"{problem} Select two text columns and the label of the dataset.")
    return [model(column)["sentence_embedding"] for column in features]


def info_nce(anchors: Tensor, positives: Tensor, temperature: float) -> Tensor:
    r"""Return the InfoNCE loss, with the positives of the other texts as negatives.

    .. math::
        L(h, h^+) = -\frac{1}{B} \sum_i \log
        \frac{e^{\cos(h_i, h_i^+) / \tau}}{\sum_j e^{\cos(h_i, h_j^+) / \tau}}

    (SimCSE; JTCSE, Equation 11.)

    Args:
        anchors: Embeddings (B, D), not normalized.
        positives: Embeddings (B, D), not normalized.
        temperature: Temperature :math:`\tau`.
    """
    cosines = normalize(anchors, dim=-1) @ normalize(positives, dim=-1).mT
    return cross_entropy(cosines / temperature, torch.arange(len(anchors), device=anchors.device))


class InteractionInfoNCELoss(nn.Module):
    r"""InfoNCE across two towers, with random roles in each batch (JTCSE, Equation 12).

    .. math::
        R \sum_{s} L(s_I, s_{II}^+) + (1 - R) \sum_{s} L(s_{II}, s_I^+), \qquad R \in \{0, 1\}

    over the streams s: the towers' states, and the cross-attention streams, if any. All streams of a batch share one R.
    The anchors are one tower's first view of each text, the positives the other tower's second view.

    R has its own generator, separate from that of dropout. The generator's state is in ``state_dict()`` as PyTorch's
    extra state.

    Args:
        temperature: As in :func:`info_nce`.
        seed: Seed of the generator.
    """

    def __init__(self, temperature: float = 0.05, seed: int = 42) -> None:
        super().__init__()
        self.temperature, self.seed = temperature, seed
        self.coin = torch.Generator().manual_seed(seed)

    def forward(self, *streams: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch, a scalar.

        Args:
            *streams: First and second view of the batch for each stream, (B, 2, D) each: tower I, tower II.
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

    with h the last hidden state of CLS and p the pooler output. No layer norm has changed the norm of p.

    Args:
        first: CLS states of the first view of each text, (B, 2, D): tower I, tower II.
        second: CLS states of the second view.
        first_pooled: Pooler outputs of the first view, (B, 2, D).
        second_pooled: Pooler outputs of the second view.
        least_cosine: Lower bound c of the cosines; below it the logarithm is undefined or too steep.
    """
    # Tower I against tower II, and tower II against tower I.
    second, second_pooled = second.flip(1), second_pooled.flip(1)
    cosines = cosine_similarity(first, second, dim=-1).clamp_min(least_cosine)
    lengths = vector_norm(first_pooled, dim=-1) + vector_norm(second_pooled, dim=-1)
    distance = vector_norm(first_pooled - second_pooled, dim=-1) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
    return (-cosines.log() * distance).sum(dim=1).mean()


class JTCSELoss(nn.Module):
    r"""Weighted sum of JTCSE's three terms (Equation 15), for a :class:`st_reba.modules.TwinTower`.

    .. math::
        L = \sum_{i \in \{I, II\}} L_{NCE}(h_i, h_i^+) + L_{ICNCE} + L_{ICTM}

    A row of the data is one text, which runs through each tower twice with different dropout for two views. With two
    texts per row, such as a sentence and its round-trip translation, these are the views. A weight of 0 removes its
    term, as in the paper's ablations (Table X).

    Args:
        model: Model whose first module is a ``TwinTower``.
        temperature: Temperature :math:`\tau` of both contrastive terms.
        info_nce_weight: Weight of InfoNCE within each tower: :func:`info_nce`.
        interaction_weight: Weight of InfoNCE across the towers, on their states and the cross-attention streams:
            :class:`InteractionInfoNCELoss`.
        modulus_weight: Weight of the tensor modulus constraint: :func:`tensor_modulus`.
        least_cosine: As in :func:`tensor_modulus`.
        seed: Seed of :class:`InteractionInfoNCELoss`.

    Raises:
        ValueError: If the model has no twin tower, a weight is negative, all weights are 0, or another value is out of
            range.
    """

    @validate_call(config=STRICT)
    def __init__(
        self,
        model: SentenceTransformer,
        *,
        temperature: Positive = 0.05,
        info_nce_weight: NotNegative = 1.0,
        interaction_weight: NotNegative = 1.0,
        modulus_weight: NotNegative = 1.0,
        least_cosine: Annotated[float, Field(gt=0, lt=1)] = 1e-4,
        seed: int = 42,
    ) -> None:
        super().__init__()
        if not isinstance(model[0], TwinTower):
            problem = f"JTCSELoss needs a TwinTower, but the model's first module is {type(model[0]).__name__}."
            raise ValueError(f"{problem} Give a model that begins with a TwinTower.")
        self.model = model
        self.weights = {"info_nce": info_nce_weight, "interaction": interaction_weight, "modulus": modulus_weight}
        if not any(self.weights.values()):
            raise ValueError("All weights are 0: give at least one above 0. The default is 1.")
        self.temperature, self.least_cosine = temperature, least_cosine
        self.interaction = InteractionInfoNCELoss(temperature, seed)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the weighted terms of a batch, scalars, which ST's trainer sums and logs individually.

        Args:
            sentence_features: One column of texts, or two.
            labels: Unused.

        Raises:
            ValueError: If there are more columns.
        """
        first, second = self._views(list(sentence_features))
        # First and second view, (B, 2, D) each; "cross_states" is missing without cross-attention.
        views = {name: (first[name], second[name]) for name in first}
        terms: dict[str, Tensor] = {}
        if self.weights["info_nce"]:
            one, other = views["cls_states"]
            terms["info_nce"] = torch.stack([info_nce(one[:, i], other[:, i], self.temperature) for i in (0, 1)]).sum()
        if self.weights["interaction"]:
            streams = [views[name] for name in ("cls_states", "cross_states") if name in views]
            terms["interaction"] = self.interaction(*streams)
        if self.weights["modulus"]:
            terms["modulus"] = tensor_modulus(*views["cls_states"], *views["pooler_outputs"], self.least_cosine)
        return {name: self.weights[name] * term for name, term in terms.items()}

    def _views(self, columns: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
        """Return the towers' outputs for the first and the second view."""
        if len(columns) == 2:
            return [self._read(column) for column in columns]
        if len(columns) != 1:
            raise ValueError(
                f"The data has {len(columns)} columns of text. Give one, or two with two versions of each text."
            )
        # Both views in one pass; dropout is independent for each row.
        twice = {
            name: torch.cat([value, value]) if isinstance(value, Tensor) else value
            for name, value in columns[0].items()
        }
        halves = {name: output.chunk(2) for name, output in self._read(twice).items()}
        return [{name: half[i] for name, half in halves.items()} for i in (0, 1)]

    def _read(self, features: dict[str, Any]) -> dict[str, Tensor]:
        outputs = self.model(features, tower_outputs=True, cross_stream=self.weights["interaction"] > 0)
        names = ("cls_states", "pooler_outputs", "cross_states")
        return {name: outputs[name] for name in names if name in outputs}

    def get_config_dict(self) -> dict[str, Any]:
        """Return the configuration for the model card."""
        settings = {"temperature": self.temperature, "least_cosine": self.least_cosine, "seed": self.interaction.seed}
        return settings | {f"{name}_weight": weight for name, weight in self.weights.items()}
