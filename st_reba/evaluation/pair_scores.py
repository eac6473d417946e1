"""How well a trained similarity of pairs agrees with labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sentence_transformers.base import BaseModel
from sentence_transformers.util import pairwise_cos_sim

from .bootstrap import pearson, spearman
from .evaluator import Evaluator


class PairScoreEvaluator(Evaluator):
    """Correlation of labels with the similarity that a model's last module gives to pairs of texts, and with cosines.

    For models that end in :class:`st_reba.modules.LayerwiseAutoencoder`: ``encode`` and then ``score_pairs``. The
    metrics are ``pearson_score``, the primary one, ``spearman_score``, ``pearson_cosine`` and ``spearman_cosine``.

    Args:
        first: Texts.
        second: As many others.
        labels: How similar they are, on any scale.
        name: Prefix of the metrics.
        batch_size: Texts at a time.
        write_csv: Whether to append the metrics to a file where an evaluation is given an ``output_path``.

    Raises:
        ValueError: If the three are not equally long, or the labels leave nothing to correlate with.
    """

    metric = "pearson_score"
    file = "pair_scores"

    def __init__(
        self,
        first: Sequence[str],
        second: Sequence[str],
        labels: Sequence[float],
        *,
        name: str = "",
        batch_size: int = 32,
        write_csv: bool = True,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, write_csv=write_csv)
        if not len(first) == len(second) == len(labels):
            raise ValueError(
                f"{len(first)} and {len(second)} texts and {len(labels)} labels were given: a pair has one of each."
            )
        if len(set(labels)) < 2:
            raise ValueError(f"{len(labels)} pairs with {len(set(labels))} different labels leave nothing to rank.")
        self.first = list(first)
        self.second = list(second)
        self.labels = np.asarray(labels, dtype=np.float64)

    def __call__(
        self, model: BaseModel, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """The metrics, also written to ``output_path`` and noted for the model card.

        Raises:
            ValueError: If the model's last module scores no pairs.
        """
        similarities = self.similarities(model)
        by_score, by_cosine = similarities.values()
        metrics = {
            "pearson_score": float(pearson({"": by_score}, self.labels).scores[0]),
            "pearson_cosine": float(pearson({"": by_cosine}, self.labels).scores[0]),
            "spearman_score": float(spearman({"": by_score}, self.labels).scores[0]),
            "spearman_cosine": float(spearman({"": by_cosine}, self.labels).scores[0]),
        }
        return self.noted(model, metrics, output_path, epoch, steps)

    def similarities(self, model: Any) -> dict[str, np.ndarray]:
        """For each pair, ``score``, the model's, and ``cosine``, that of the embeddings."""
        if not hasattr(model[-1], "score_pairs"):
            raise ValueError(
                f"The model ends in {type(model[-1]).__name__}, which scores no pairs. Use a model that ends in "
                "LayerwiseAutoencoder, or ST's EmbeddingSimilarityEvaluator."
            )
        first, second = (
            model.encode(texts, batch_size=self.batch_size, convert_to_tensor=True, show_progress_bar=False)
            for texts in (self.first, self.second)
        )
        return {
            "score": model[-1].score_pairs(first, second).numpy(),
            "cosine": pairwise_cos_sim(first, second).float().cpu().numpy(),
        }
