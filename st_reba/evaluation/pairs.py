"""Pairs of texts: how a model's similarities agree with labels, also under a condition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.util import pairwise_cos_sim

from ..text.presets import in_context
from .bootstrap import pearson, spearman
from .evaluator import TabulatedEvaluator


class PairScoreEvaluator(TabulatedEvaluator):
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

    def metrics_of(self, model: Any) -> dict[str, float]:
        by_score, by_cosine = self.similarities(model).values()
        return {
            "pearson_score": float(pearson({"": by_score}, self.labels).scores[0]),
            "pearson_cosine": float(pearson({"": by_cosine}, self.labels).scores[0]),
            "spearman_score": float(spearman({"": by_score}, self.labels).scores[0]),
            "spearman_cosine": float(spearman({"": by_cosine}, self.labels).scores[0]),
        }

    def similarities(self, model: Any) -> dict[str, np.ndarray]:
        """For each pair, ``score``, the model's, and ``cosine``, that of the embeddings.

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
    """How well the cosine similarity of two sentences, each read under a condition, ranks as people do.

    The condition is a prompt of each sentence's own. As :func:`st_reba.in_context` words it, the model's module should
    have the template ``csts``; as :func:`st_reba.in_terms_of` does, ``ponte``. The metrics are ``spearman_cosine``, the
    primary one and the paper's, and ``pearson_cosine``.

    Args:
        sentences1: n sentences.
        sentences2: n sentences, the other of each pair.
        conditions: n conditions, such as "the number of people".
        scores: n similarities under the condition, 1 to 5 in C-STS.
        worded: Makes what the model embeds of a sentence and its condition; for a trained encoder, a string.
        **kwargs: As for ST's ``EmbeddingSimilarityEvaluator``.

    Raises:
        ValueError: If the four are not equally long, or the scores leave nothing to rank.
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
        """From rows with sentence1, sentence2, condition and score: :func:`st_reba.train.read_conditional_pairs`."""
        table = [(row["sentence1"], row["sentence2"], row["condition"], row["score"]) for row in rows]
        sentences1, sentences2, conditions, scores = zip(*table, strict=True) if table else ((), (), (), ())
        return cls(sentences1, sentences2, conditions, scores, **kwargs)
