"""Tasks with labels: pairs, pairs in two classes, triplets, retrieval, and texts in classes.

A task lists the texts to embed, measures each item by similarities of texts, and has scores, which are columns of a
table. It is also an evaluator of sentence-transformers, with the scores and names of ST's own evaluators of the same
task; for texts in classes ST has none.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from sentence_transformers.base import BaseModel
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.util import pairwise_cos_sim, semantic_search
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn.functional import normalize

from ..data.tables import Classes, Labelled, Pairs, Retrieval, Triplets
from . import bootstrap
from .bootstrap import Array, Estimate, Items, Kind

#: Values of the items, (N,), by name.
Measured = Mapping[str, Array]
#: Role in which a text is embedded; empty if there is one role.
Role = Literal["", "query", "document"]

#: Number of documents that are found for a query, and of those that count for nDCG.
_FOUND = 100
_RANKED = 10

#: Error message for plain texts.
NO_LABELS = (
    "plain texts have no labels to score by: give pairs with scores, triplets, texts with a label each, or a retrieval "
    "task."
)

#: Least number of pairs that are alike, and of texts in classes, for an interval of their score.
LEAST_POSITIVES = 20
LEAST_CLASSIFIED = 100

#: Number of nearest texts that tell the class of a text, at most.
_NEIGHBOURS = 5


class Ranker(Protocol):
    """Search for documents."""

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[list[tuple[int, float]]]:
        """Return indices and scores of at most ``count`` documents for each query, the best first."""


class Similarity(Ranker, Protocol):
    """Similarity of texts."""

    def cosines(self, first: Sequence[str], second: Sequence[str]) -> Array:
        """Return the cosine of each text and the one at its place among the others, (B,)."""

    def unit_vectors(self, texts: Sequence[str]) -> Any:
        """Return vectors of length 1, whose products are the cosines, (B, D), dense or sparse."""


@dataclass(frozen=True)
class Vectors:
    """Similarity by the cosine of embeddings.

    Attributes:
        look_up: Returns the embeddings of B texts in a role, (B, D), on the CPU.
    """

    look_up: Callable[[Sequence[str], Role], Tensor]

    @classmethod
    def of(cls, inputs: Sequence[tuple[Role, list[str]]], embed: Callable[[list[str], Role], Tensor]) -> Vectors:
        """Return the similarity of texts that are embedded here, each once in its role.

        Args:
            inputs: Roles, each with its texts.
            embed: Function from B texts and their role to embeddings, (B, D), on the CPU.
        """
        vectors = {role: embed(texts, role) for role, texts in inputs}
        places = {role: {text: place for place, text in enumerate(texts)} for role, texts in inputs}
        return cls(lambda texts, role: vectors[role][[places[role][text] for text in texts]])

    def cosines(self, first: Sequence[str], second: Sequence[str]) -> Array:
        return np.asarray(pairwise_cos_sim(self.look_up(first, ""), self.look_up(second, "")).numpy())

    def unit_vectors(self, texts: Sequence[str]) -> Any:
        return normalize(self.look_up(texts, "").float()).numpy()

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[list[tuple[int, float]]]:
        rankings = semantic_search(self.look_up(queries, "query"), self.look_up(documents, "document"), top_k=count)
        return [[(int(hit["corpus_id"]), float(hit["score"])) for hit in hits] for hits in rankings]


@dataclass(frozen=True)
class Measure:
    """Column of a table of scores.

    Attributes:
        name: Name, such as ``"STS"`` or ``"Word sense"``.
        metric: Name of the metric, such as ``"Spearman x 100"``.
        scale: Factor of values that are shown, above 0.
        chance: Value of guessing, unscaled; None if that is not worth showing.
        note: Sentence about the measurement.
        unit: Items of the average, in the plural, such as ``"labelled pairs"``.
    """

    name: str
    metric: str
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 100.0
    chance: float | None = None
    note: str = ""
    unit: str = "items"

    def show(self, value: float, decimals: int | None = None) -> str:
        """Format a value: scaled, to a thousandth of the scale (100: one decimal), with a true minus."""
        if math.isnan(value):
            return "n/a"
        if decimals is None:
            decimals = max(0, 3 - round(math.log10(self.scale)))
        # Adding 0 turns -0.0 into 0.0.
        shown = round(value * self.scale, decimals) + 0.0
        return f"{shown:.{decimals}f}".replace("-", "\N{MINUS SIGN}")

    def show_interval(self, estimate: Estimate, decimals: int | None = None) -> str:
        """Return the 95% interval in brackets; empty if there is none."""
        if math.isnan(estimate.low) or math.isnan(estimate.high):
            return ""
        return f"[{self.show(estimate.low, decimals)}, {self.show(estimate.high, decimals)}]"

    def show_with_interval(self, estimate: Estimate, mark: str = "") -> str:
        """Return the value, behind it a mark, the corrected value of the best recipe, and the interval."""
        value = f"{self.show(estimate.value)}{mark}"
        corrected = "" if estimate.corrected is None else f", corrected {self.show(estimate.corrected)}"
        return f"{value}{corrected} {self.show_interval(estimate)}".rstrip()


@dataclass(frozen=True)
class Score:
    """Score of a task.

    Attributes:
        column: Its column of a table.
        of: Name of the items' values.
        kind: The statistic.
        labels: (N,), if the statistic needs them.
        name: Name in sentence-transformers; empty if that has no such score.
        has_interval: Whether there are enough items for an interval that covers.
    """

    column: Measure
    of: str
    kind: Kind = "mean"
    labels: Sequence[float] | None = None
    name: str = ""
    has_interval: bool = True

    def items(self, measured: Mapping[str, Measured]) -> Items:
        """Return the items of each recipe's score."""
        values = {recipe: by_name[self.of] for recipe, by_name in measured.items()}
        return bootstrap.checked_items(self.kind, values, self.labels)


class Task(BaseEvaluator):
    """Labelled data, and the scores of recipes on them. :func:`task_of` makes the right kind.

    Args:
        data: The data.
        batch_size: Number of texts at a time if the task is called as an evaluator.

    Attributes:
        unit: Items of the score, in the plural.
        prompts: Prompt of each role.
    """

    unit: ClassVar[str]

    def __init__(self, data: Any, batch_size: int = 32) -> None:
        super().__init__()
        self.data, self.batch_size = data, batch_size
        self.primary_metric = self.scores[0].name
        self.prompts: Mapping[str, str] = getattr(data, "prompts", {})

    def inputs(self) -> list[tuple[Role, list[str]]]:
        """Return the texts to embed, each once in its role."""
        return [("", self.data.texts())]

    @abstractmethod
    def measure(self, similarity: Any) -> Measured:
        """Return the values of the items by a :class:`Similarity`; for retrieval a :class:`Ranker` is enough."""

    @property
    @abstractmethod
    def scores(self) -> list[Score]:
        """The scores, the one that decides first."""

    def prompt(self, role: Role) -> str | None:
        """Return the prompt of a role."""
        return self.prompts.get(role) or None

    def __call__(
        self, model: BaseModel, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Return the scores of a model, with its own prompts of queries and documents."""
        reader: Any = model
        encoders = {"": reader.encode, "query": reader.encode_query, "document": reader.encode_document}
        settings = {"batch_size": self.batch_size, "convert_to_tensor": True, "show_progress_bar": False}

        def embed(texts: list[str], role: Role) -> Tensor:
            vectors: Tensor = encoders[role](texts, **settings)
            return vectors.cpu()

        measured = self.measure(Vectors.of(self.inputs(), embed))
        return {score.name: float(score.items({"": measured}).scores[0]) for score in self.scores}


class PairTask(Task):
    """Graded pairs: rank correlation of cosines with labels."""

    unit = "labelled pairs"
    data: Pairs

    def measure(self, similarity: Similarity) -> Measured:
        return {"cosine": similarity.cosines(self.data.first, self.data.second)}

    @property
    def scores(self) -> list[Score]:
        note = f"Correlation of cosine similarities with the labels of {len(self.data)} pairs of texts."
        ranks = Measure("STS", "Spearman x 100", note=note, unit=self.unit)
        values = replace(ranks, name="STS, Pearson", metric="Pearson x 100")
        return [
            Score(ranks, "cosine", "spearman", self.data.scores, "spearman_cosine"),
            Score(values, "cosine", "pearson", self.data.scores, "pearson_cosine"),
        ]


class TwoClassesTask(PairTask):
    """Pairs in two classes: average precision of the pairs in the order of their cosines."""

    @property
    def scores(self) -> list[Score]:
        highest = max(self.data.scores)
        alike = [int(score == highest) for score in self.data.scores]
        pairs = f"the {sum(alike)} pairs that are alike among {len(alike)}"
        note = f"Average precision of {pairs}, in the order of their cosine similarities."
        chance = sum(alike) / len(alike)
        precision = Measure("Two classes", "average precision x 100", chance=chance, note=note, unit=self.unit)
        has_interval = sum(alike) >= LEAST_POSITIVES
        return [Score(precision, "cosine", "average_precision", alike, "cosine_ap", has_interval)]


class TripletTask(Task):
    """Triplets: share of anchors that are nearer to their positive than to their negative."""

    unit = "triplets"
    data: Triplets

    def measure(self, similarity: Similarity) -> Measured:
        positive = similarity.cosines(self.data.anchors, self.data.positives)
        negative = similarity.cosines(self.data.anchors, self.data.negatives)
        # Ties count half.
        return {"correct": (np.sign(positive - negative) + 1) / 2}

    @property
    def scores(self) -> list[Score]:
        note = f"How many of {len(self.data)} anchors are nearer to their positive than to their negative, by cosine."
        nearer = Measure("Triplets", "accuracy x 100", chance=0.5, note=note, unit=self.unit)
        return [Score(nearer, "correct", name="cosine_accuracy")]


class RetrievalTask(Task):
    """Retrieval: nDCG and recall of documents in the order of their cosines with a query."""

    unit = "queries"
    data: Retrieval

    def inputs(self) -> list[tuple[Role, list[str]]]:
        queries, documents = dict.fromkeys(self.data.queries.values()), dict.fromkeys(self.data.documents.values())
        return [("query", list(queries)), ("document", list(documents))]

    def measure(self, similarity: Ranker) -> Measured:
        names = list(self.data.documents)
        rankings = similarity.nearest(list(self.data.queries.values()), list(self.data.documents.values()), _FOUND)
        gains = 1 / np.log2(np.arange(_RANKED) + 2)
        ndcg, recall = [], []
        for query, hits in zip(self.data.queries, rankings, strict=True):
            relevant = set(self.data.relevant[query])
            hit = np.array([names[index] in relevant for index, _ in hits], dtype=np.float64)
            ndcg.append(hit[:_RANKED] @ gains[: len(hit)] / gains[: len(relevant)].sum())
            recall.append(hit.sum() / len(relevant))
        return {"ndcg": np.array(ndcg), "recall": np.array(recall)}

    @property
    def scores(self) -> list[Score]:
        size = f"{len(self.data)} queries, each among {len(self.data.documents)} documents"
        gain = f"Normalised discounted cumulative gain of the first {_RANKED} by cosine"
        note = f"{gain}, a document being relevant or not: the mean of {size}."
        ndcg = Measure("Retrieval", f"nDCG@{_RANKED} x 100", note=note, unit=self.unit)
        note = f"How much of what is relevant is among the first {_FOUND}: the mean of {size}."
        recall = Measure(f"Recall@{_FOUND}", f"recall@{_FOUND} x 100", note=note, unit=self.unit)
        return [
            Score(ndcg, "ndcg", name=f"cosine_ndcg@{_RANKED}"),
            Score(recall, "recall", name=f"cosine_recall@{_FOUND}"),
        ]


class ClassesTask(Task):
    """Texts in classes: accuracy of the class that most of a text's nearest others have.

    A text that is alone in its class is never right: no other text has its class. :func:`st_reba.data.tables.read_data`
    leaves such texts out.

    Args:
        data: The data.
        batch_size: As for :class:`Task`.
        neighbours: Number of nearest texts; None: one less than the smallest class has texts, 5 at most.
    """

    unit = "labelled texts"
    data: Classes

    def __init__(self, data: Classes, batch_size: int = 32, neighbours: int | None = None) -> None:
        _, self.classes, self.sizes = np.unique(list(data.labels.values()), return_inverse=True, return_counts=True)
        self.neighbours = neighbours or int(np.clip(self.sizes.min() - 1, 1, _NEIGHBOURS))
        super().__init__(data, batch_size)

    def measure(self, similarity: Similarity) -> Measured:
        vectors = similarity.unit_vectors(self.data.texts())
        # Without two classes, one of them with two texts, nothing can be scored.
        if len(self.sizes) < 2 or self.sizes.max() < 2 or not np.isfinite(vectors.sum()):
            return {"right": np.full(len(self.data), np.nan)}
        # One more than vote, to take the place of one that is left out.
        count = min(self.neighbours + 1, len(self.data) - 1)
        # Without texts of its own to look for, it takes none for its own neighbour.
        _, nearest = NearestNeighbors(n_neighbors=count, metric="cosine").fit(vectors).kneighbors()
        return {"right": accuracy_shares(self.classes, nearest, min(self.neighbours, count))}

    @property
    def scores(self) -> list[Score]:
        count, chance = len(self.data), float(self.sizes.max() / len(self.data))
        note = (
            f"How many of {count} texts in {len(self.sizes)} classes are of the class that most of their "
            f"{self.neighbours} nearest others have, by cosine; of classes as frequent the nearest text's counts. "
            f"Naming the largest class every time scores {100 * chance:.1f}."
        )
        nearest = Measure("Classes", f"{self.neighbours}-NN accuracy x 100", chance=chance, note=note, unit=self.unit)
        return [Score(nearest, "right", name="knn_accuracy", has_interval=count >= LEAST_CLASSIFIED)]


def accuracy_shares(classes: ArrayLike, nearest: NDArray[np.int64], count: int) -> Array:
    r"""Return what each text adds to the accuracy of its neighbours' vote; the mean of the shares is the accuracy.

    A share is whether the text is right, and a third of what it adds to others: where it is among their nearest, the
    next one would vote in its place. Resampled means of the shares give the interval. Right and wrong alone have 0.7 to
    1.0 of the spread between samples, a third 0.9 to 1.2, all of what it adds 1.6 to 2.2: what several texts change
    together would count once for each of them.

    Args:
        classes: (N,).
        nearest: (N, K) indices of the nearest other texts, the nearest first; K is ``count`` or one more.
        count: Number of neighbours that vote.

    Returns:
        (N,).
    """
    labels, number = np.asarray(classes), len(nearest)

    def right(voters: NDArray[Any]) -> Array:
        votes = (voters[:, :, None] == voters[:, None, :]).sum(axis=2)
        # argmax takes the first of equals, which is the nearest.
        return np.asarray(voters[np.arange(number), votes.argmax(axis=1)] == labels, dtype=np.float64)

    neighbours = labels[nearest]
    correct = right(neighbours[:, :count])
    left_out = np.zeros(number)
    for place in range(count):
        others = np.delete(neighbours, place, axis=1)
        change = right(others) - correct if others.shape[1] else -correct
        left_out += np.bincount(nearest[:, place], change, number)
    return np.asarray(correct - (left_out - left_out.mean()) / 3)


def task_of(data: Labelled, batch_size: int = 32, neighbours: int | None = None) -> Task:
    """Return the task of labelled data.

    Args:
        data: The data.
        batch_size: As for :class:`Task`.
        neighbours: As for :class:`ClassesTask`.

    Raises:
        ValueError: If the texts have no labels.
    """
    if not isinstance(data, Labelled):
        raise ValueError(NO_LABELS)
    if isinstance(data, Retrieval):
        return RetrievalTask(data, batch_size)
    if isinstance(data, Triplets):
        return TripletTask(data, batch_size)
    if isinstance(data, Classes):
        return ClassesTask(data, batch_size, neighbours)
    return (TwoClassesTask if data.two_classes else PairTask)(data, batch_size)
