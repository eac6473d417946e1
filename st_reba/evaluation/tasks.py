"""What recipes are scored on by labels: pairs, pairs in two classes, triplets, retrieval. One way to use them all.

A task names the texts to embed, measures each item by how alike texts are, and says which statistic of the items is the
score. sentence-transformers' own evaluator of the task stands beside that: :meth:`Task.evaluator` gives the numbers
that are shown, the items give their intervals, and both are the same score.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.evaluation import (
    BinaryClassificationEvaluator,
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
    TripletEvaluator,
)
from sentence_transformers.util import cos_sim, pairwise_cos_sim, semantic_search
from torch import Tensor

from ..data.tables import Labelled, Pairs, Retrieval, Triplets
from . import bootstrap
from .bootstrap import Statistic

Array = NDArray[np.float64]
#: What was measured on each item, (N,), by what it is.
Measured = Mapping[str, Array]
#: As what a text is embedded; empty where all are embedded alike.
Role = Literal["", "query", "document"]

#: Documents that are looked at for a query, and those that nDCG looks at.
_FOUND = 100
_RANKED = 10


class Ranker(Protocol):
    """What finds documents for queries."""

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[list[tuple[int, float]]]:
        """For each query the most similar documents, at most so many, the best first: their indices and scores."""


class Similarity(Ranker, Protocol):
    """How alike texts are, to something that compares them."""

    def cosines(self, first: Sequence[str], second: Sequence[str]) -> Array:
        """Of each text with the one in its place among the others, (B,)."""


@dataclass(frozen=True)
class Vectors:
    """Similarity by the cosine of embeddings.

    Attributes:
        look_up: From B texts and what they are to their embeddings, (B, D), on the CPU.
    """

    look_up: Callable[[Sequence[str], Role], Tensor]

    def cosines(self, first: Sequence[str], second: Sequence[str]) -> Array:
        return np.asarray(pairwise_cos_sim(self.look_up(first, ""), self.look_up(second, "")).numpy())

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[list[tuple[int, float]]]:
        found = semantic_search(self.look_up(queries, "query"), self.look_up(documents, "document"), top_k=count)
        return [[(int(hit["corpus_id"]), float(hit["score"])) for hit in hits] for hits in found]


@dataclass(frozen=True)
class Metric:
    """One score of a task: a column of a table.

    Attributes:
        name: Of the column.
        metric: Such as ``"Spearman"``.
        of_st: What the task's evaluator calls it; empty if it does not give it.
        statistic: From what was measured, by recipe, to the score as a function of the items.
        note: What was measured, in a sentence.
        chance: What guessing gives; None if that is not a number worth showing.
        beyond: Whether it is what is left once tf-idf is given, and so has no number for tf-idf itself.
    """

    name: str
    metric: str
    of_st: str
    statistic: Callable[[Mapping[str, Measured]], Statistic]
    note: str
    chance: float | None = None
    beyond: bool = False


class Task(ABC):
    """Labelled data, and how recipes are scored on them. :func:`task_of` makes the right kind.

    Attributes:
        data: What was read.
        unit: What the score is an average over, in the plural.
        prompts: What stands before a text of each role.
    """

    unit: ClassVar[str]
    data: Labelled

    @property
    def prompts(self) -> Mapping[str, str]:
        return {}

    @abstractmethod
    def inputs(self) -> list[tuple[Role, list[str]]]:
        """The texts to embed, each once in its role."""

    @abstractmethod
    def measure(self, similarity: Similarity) -> Measured:
        """What each item gives, (N,)."""

    @abstractmethod
    def metrics(self, overlap: Measured | None = None) -> list[Metric]:
        """The scores, the one that decides first.

        Args:
            overlap: What tf-idf gives, for the metrics that are given it.
        """

    @abstractmethod
    def evaluator(self, batch_size: int = 32) -> BaseEvaluator:
        """sentence-transformers' own, whose primary metric is the score that decides."""

    @property
    def scorable(self) -> bool:
        """Whether the labels leave something to score: a part of the data may have labels that are all alike."""
        return True

    def prompt(self, role: Role) -> str | None:
        """What stands before a text."""
        return self.prompts.get(role) or None

    def score(self, similarity: Similarity) -> float:
        """The score that decides, from all items."""
        return float(self.metrics()[0].statistic({"": self.measure(similarity)}).values()[0])


class PairTask(Task):
    """Graded pairs: the rank correlation of cosines with labels."""

    unit = "labelled pairs"
    data: Pairs

    def __init__(self, data: Pairs) -> None:
        self.data = data

    def inputs(self) -> list[tuple[Role, list[str]]]:
        return [("", self.data.texts())]

    def measure(self, similarity: Similarity) -> Measured:
        return {"cosine": similarity.cosines(self.data.first, self.data.second)}

    def metrics(self, overlap: Measured | None = None) -> list[Metric]:
        note = f"Correlation of cosine similarities with the labels of {len(self.data)} pairs of texts."
        return [
            Metric("STS", "Spearman", "spearman_cosine", self._correlation(bootstrap.spearman), note),
            *self._beyond(overlap),
            Metric("STS, Pearson", "Pearson", "pearson_cosine", self._correlation(bootstrap.pearson), note),
        ]

    def evaluator(self, batch_size: int = 32) -> BaseEvaluator:
        return EmbeddingSimilarityEvaluator(
            self.data.first,
            self.data.second,
            self.data.scores,
            batch_size=batch_size,
            main_similarity="cosine",
            write_csv=False,
        )

    @property
    def scorable(self) -> bool:
        return len(set(self.data.scores)) > 1

    def _correlation(self, correlation: Callable[..., Statistic]) -> Callable[[Mapping[str, Measured]], Statistic]:
        return lambda measured: correlation(_each(measured, "cosine"), self.data.scores)

    def _beyond(self, overlap: Measured | None) -> list[Metric]:
        if overlap is None:
            return []
        note = (
            "What is left of it once the ranks by tf-idf are taken out: partial rank correlation with the labels, "
            "given the cosine of the tf-idf of the texts' tokens"
        )

        def statistic(measured: Mapping[str, Measured]) -> Statistic:
            return bootstrap.partial_spearman(_each(measured, "cosine"), self.data.scores, overlap["cosine"])

        return [Metric("Beyond overlap", "partial Spearman", "", statistic, note, beyond=True)]


class ClassTask(PairTask):
    """Pairs in two classes: average precision, where the pairs are ordered by their cosines."""

    @property
    def _alike(self) -> list[int]:
        alike = max(self.data.scores)
        return [int(score == alike) for score in self.data.scores]

    def metrics(self, overlap: Measured | None = None) -> list[Metric]:
        labels = self._alike
        note = (
            f"Average precision of the {sum(labels)} pairs that are alike among {len(labels)}, in the order of their "
            "cosine similarities."
        )
        return [
            Metric(
                "Two classes",
                "average precision",
                "cosine_ap",
                lambda measured: bootstrap.average_precision(_each(measured, "cosine"), labels),
                note,
                chance=sum(labels) / len(labels),
            ),
            *self._beyond(overlap),
            Metric(
                "Two classes, Spearman",
                "Spearman",
                "",
                self._correlation(bootstrap.spearman),
                "Rank correlation of cosine similarities with the two classes.",
            ),
        ]

    def evaluator(self, batch_size: int = 32) -> BaseEvaluator:
        return BinaryClassificationEvaluator(
            self.data.first,
            self.data.second,
            self._alike,
            batch_size=batch_size,
            similarity_fn_names=["cosine"],
            write_csv=False,
        )


class TripletTask(Task):
    """Triplets: how often an anchor is nearer to its positive than to its negative."""

    unit = "triplets"
    data: Triplets

    def __init__(self, data: Triplets) -> None:
        self.data = data

    def inputs(self) -> list[tuple[Role, list[str]]]:
        return [("", self.data.texts())]

    def measure(self, similarity: Similarity) -> Measured:
        positive = similarity.cosines(self.data.anchors, self.data.positives)
        negative = similarity.cosines(self.data.anchors, self.data.negatives)
        return {"correct": (positive > negative).astype(np.float64)}

    def metrics(self, overlap: Measured | None = None) -> list[Metric]:
        note = f"How many of {len(self.data)} anchors are nearer to their positive than to their negative, by cosine."
        mean = _mean_of("correct")
        return [Metric("Triplets", "accuracy", "cosine_accuracy", mean, note, chance=0.5)]

    def evaluator(self, batch_size: int = 32) -> BaseEvaluator:
        return TripletEvaluator(
            self.data.anchors,
            self.data.positives,
            self.data.negatives,
            main_similarity_function="cosine",
            batch_size=batch_size,
            write_csv=False,
        )


class RetrievalTask(Task):
    """Retrieval: which documents stand first for a query, in the order of their cosines with it."""

    unit = "queries"
    data: Retrieval

    def __init__(self, data: Retrieval) -> None:
        self.data = data

    @property
    def prompts(self) -> Mapping[str, str]:
        return self.data.prompts

    def inputs(self) -> list[tuple[Role, list[str]]]:
        return [
            ("query", list(dict.fromkeys(self.data.queries.values()))),
            ("document", list(dict.fromkeys(self.data.documents.values()))),
        ]

    def measure(self, similarity: Ranker) -> Measured:
        names = list(self.data.documents)
        found = similarity.nearest(list(self.data.queries.values()), list(self.data.documents.values()), _FOUND)
        evaluator = self.evaluator()
        scores = [
            _alone(evaluator, query, [{"corpus_id": names[index], "score": score} for index, score in hits])
            for query, hits in zip(self.data.queries, found, strict=True)
        ]
        return {
            "ndcg": np.array([score["ndcg@k"][_RANKED] for score in scores], dtype=np.float64),
            "recall": np.array([score["recall@k"][_FOUND] for score in scores], dtype=np.float64),
        }

    def metrics(self, overlap: Measured | None = None) -> list[Metric]:
        size = f"{len(self.data)} queries, each among {len(self.data.documents)} documents"
        return [
            Metric(
                "Retrieval",
                f"nDCG@{_RANKED}",
                f"cosine_ndcg@{_RANKED}",
                _mean_of("ndcg"),
                f"Normalised discounted cumulative gain of the first {_RANKED} by cosine, a document being relevant or "
                f"not: the mean of {size}.",
            ),
            Metric(
                f"Recall@{_FOUND}",
                f"recall@{_FOUND}",
                f"cosine_recall@{_FOUND}",
                _mean_of("recall"),
                f"How much of what is relevant is among the first {_FOUND}: the mean of {size}.",
            ),
        ]

    def evaluator(self, batch_size: int = 32) -> InformationRetrievalEvaluator:
        queries: dict[str, Any] = dict(self.data.queries)
        documents: dict[str, Any] = dict(self.data.documents)
        return InformationRetrievalEvaluator(
            queries,
            documents,
            {query: set(documents) for query, documents in self.data.relevant.items()},
            accuracy_at_k=[_RANKED],
            mrr_at_k=[_RANKED],
            map_at_k=[_RANKED],
            ndcg_at_k=[_RANKED],
            precision_recall_at_k=[_FOUND],
            batch_size=batch_size,
            score_functions={"cosine": cos_sim},
            main_score_function="cosine",
            write_csv=False,
        )


def task_of(data: Labelled) -> Task:
    """The task that labelled data are."""
    if isinstance(data, Retrieval):
        return RetrievalTask(data)
    if isinstance(data, Triplets):
        return TripletTask(data)
    return ClassTask(data) if data.two_classes else PairTask(data)


def _alone(evaluator: InformationRetrievalEvaluator, query: str, hits: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of one query by itself: sentence-transformers gives their means."""
    one = copy.copy(evaluator)
    one.queries_ids = [query]
    one.queries = [query]
    found: dict[str, Any] = one.compute_metrics([hits])
    return found


def _each(measured: Mapping[str, Measured], what: str) -> dict[str, Array]:
    return {recipe: own[what] for recipe, own in measured.items()}


def _mean_of(what: str) -> Callable[[Mapping[str, Measured]], Statistic]:
    return lambda measured: bootstrap.mean(_each(measured, what))
