"""Conditional semantic textual similarity (C-STS; Deshpande et al., EMNLP 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from ..text.templates import in_context


class ConditionalSimilarityEvaluator(EmbeddingSimilarityEvaluator):
    """How well the cosine similarity of two sentences, each read under a condition, ranks as people do.

    The condition is a prompt of each sentence's own, as :func:`st_reba.in_context` words it; the model's module should
    have the template ``csts``. The metrics are ``spearman_cosine``, the primary one and the paper's, and
    ``pearson_cosine``.

    Args:
        sentences1: n sentences.
        sentences2: n sentences, the other of each pair.
        conditions: n conditions, such as "the number of people".
        scores: n similarities under the condition, 1 to 5 in C-STS.
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
        first: list[Any] = list(map(in_context, sentences1, conditions))
        second: list[Any] = list(map(in_context, sentences2, conditions))
        super().__init__(first, second, list(scores), **kwargs)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], **kwargs: Any) -> ConditionalSimilarityEvaluator:
        """From rows with sentence1, sentence2, condition and score: :func:`st_reba.train.read_conditional_pairs`."""
        table = [(row["sentence1"], row["sentence2"], row["condition"], row["score"]) for row in rows]
        sentences1, sentences2, conditions, scores = zip(*table, strict=True) if table else ((), (), (), ())
        return cls(sentences1, sentences2, conditions, scores, **kwargs)
