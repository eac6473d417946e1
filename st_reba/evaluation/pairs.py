"""Evaluation of pairs of texts: correlation of a model's similarities with labels, also under a condition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.util import pairwise_cos_sim

from ..text.presets import in_context
from .bootstrap import pearson, spearman
from .evaluator import Evaluator


class PairScoreEvaluator(Evaluator):
    """Correlation of labels with the similarities that a model's last module computes, and with cosines.

    For models that end in :class:`st_reba.modules.LayerwiseAutoencoder`: ``encode`` and then ``score_pairs``. The
    metrics are ``pearson_score``, the primary one, ``spearman_score``, ``pearson_cosine`` and ``spearman_cosine``.

    Args:
        first: N texts.
        second: N texts, the other of each pair.
        labels: N similarities, on any scale.
        **settings: As for :class:`~st_reba.evaluation.evaluator.Evaluator`: ``name``, ``batch_size``, ``write_csv``.

    Raises:
        ValueError: If the three are not equally long, or all labels are equal.
    """

    metric = "pearson_score"
    file = "pair_scores"

    def __init__(self, first: Sequence[str], second: Sequence[str], labels: Sequence[float], **settings: Any) -> None:
        super().__init__(**settings)
        if not len(first) == len(second) == len(labels):
            raise ValueError(
                f"{len(first)} and {len(second)} texts and {len(labels)} labels were given: a pair has one of each."
            )
        if len(set(labels)) < 2:
            raise ValueError(f"{len(labels)} pairs with {len(set(labels))} different labels leave nothing to rank.")
        self.first, self.second, self.labels = list(first), list(second), np.asarray(labels, dtype=np.float64)

    def metrics_of(self, model: Any) -> dict[str, float]:
        found = self.similarities(model)
        return {
            f"{name}_{kind}": float(statistic({"": values}, self.labels).scores[0])
            for name, statistic in (("pearson", pearson), ("spearman", spearman))
            for kind, values in found.items()
        }

    def similarities(self, model: Any) -> dict[str, np.ndarray]:
        """Return the ``score`` that the model computes for each pair, and the ``cosine`` of its embeddings.

        Raises:
            ValueError: If the model's last module scores no pairs.
        """
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


class ConditionalSimilarityEvaluator(EmbeddingSimilarityEvaluator):
    """Correlation of people's scores with the cosine similarity of two sentences, each read under a condition.

    The condition is in a prompt of each sentence's own. For :func:`st_reba.in_context` the model's module should have
    the template ``csts``, for :func:`st_reba.in_terms_of` the template ``ponte``. The metrics are ``spearman_cosine``,
    the primary one and the paper's, and ``pearson_cosine``.

    Args:
        sentences1: n sentences.
        sentences2: n sentences, the other of each pair.
        conditions: n conditions, such as "the number of people".
        scores: n similarities under the condition, 1 to 5 in C-STS.
        worded: Makes the model's input from a sentence and its condition; for a trained encoder, a string.
        **kwargs: As for ST's ``EmbeddingSimilarityEvaluator``.

    Raises:
        ValueError: If the four are not equally long, or all scores are equal.
    """

    def __init__(
        self,
        sentences1: Sequence[str],
        sentences2: Sequence[str],
        conditions: Sequence[str],
        scores: Sequence[float],
        *,
        worded: Callable[[str, str], Any] = in_context,
        **kwargs: Any,
    ) -> None:
        lengths = [len(sentences1), len(sentences2), len(conditions), len(scores)]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"sentences1, sentences2, conditions and scores have {lengths} items: give one of each for every row."
            )
        if len(set(scores)) < 2:
            raise ValueError(f"{len(scores)} rows with {len(set(scores))} different scores leave nothing to rank.")
        kwargs.setdefault("main_similarity", "cosine")
        first: list[Any] = list(map(worded, sentences1, conditions))
        second: list[Any] = list(map(worded, sentences2, conditions))
        super().__init__(first, second, list(scores), **kwargs)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], **kwargs: Any) -> ConditionalSimilarityEvaluator:
        """Make it of rows, as :func:`st_reba.train.read_conditional_pairs` returns them."""
        table = list(rows)
        names = ("sentence1", "sentence2", "condition", "score")
        return cls(*([row[name] for row in table] for name in names), **kwargs)
