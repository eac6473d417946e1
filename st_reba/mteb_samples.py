"""What an mteb score is made of, item by item, so that it can be resampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import average_precision_score

if TYPE_CHECKING:
    from mteb import AbsTask, TaskResult

Statistic = Literal["mean", "spearman", "pearson", "best_accuracy", "average_precision"]


@dataclass(frozen=True)
class Sample:
    """The items behind one split's score (one language's, where a task has several).

    A task's score is the mean of its samples' :attr:`value`.

    Attributes:
        split: The split's name, such as ``"test"``.
        subset: mteb's name of the language or part, such as ``"default"``.
        unit: What an item is: a pair, a text, a query, an experiment (one of mteb's training draws) or a clustering.
        statistic: Which of :data:`STATISTICS` gives the score.
        arrays: Its arguments, each with the n items along the first axis: draw the same rows from all of them.
    """

    split: str
    subset: str
    unit: Literal["pair", "text", "query", "experiment", "clustering"]
    statistic: Statistic
    arrays: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def value(self) -> float:
        """The split's score."""
        return STATISTICS[self.statistic](*self.arrays)


def _best_accuracy(labels: np.ndarray, scores: np.ndarray) -> float:
    """Share of pairs on the right side of the best threshold, for the best of the similarities, (n, similarities)."""
    positive = labels[np.argsort(-scores, axis=0, kind="stable")] == 1
    right = np.cumsum(positive, axis=0) + (~positive).sum(axis=0) - np.cumsum(~positive, axis=0)
    # As in mteb, a threshold lies between two pairs.
    return float(right[:-1].max() / len(labels)) if len(labels) > 1 else 0.0


def _average_precision(labels: np.ndarray, scores: np.ndarray) -> float:
    return max(float(average_precision_score(labels, column)) for column in scores.T)


#: From a sample's arrays to its score.
STATISTICS: dict[Statistic, Callable[..., float]] = {
    "mean": lambda values: float(values.mean()),
    "spearman": lambda labels, scores: float(spearmanr(labels, scores).statistic),
    "pearson": lambda labels, scores: float(pearsonr(labels, scores).statistic),
    "best_accuracy": _best_accuracy,
    "average_precision": _average_precision,
}


def write_samples(samples: list[Sample], path: Path) -> None:
    """Write as JSON; the file takes its place when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = [{**asdict(sample), "arrays": [array.tolist() for array in sample.arrays]} for sample in samples]
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(content), encoding="utf-8")
    scratch.replace(path)


def read_samples(path: Path) -> list[Sample]:
    """What :func:`write_samples` wrote; nothing if there is no such file."""
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Sample(**{**entry, "arrays": [np.asarray(array) for array in entry["arrays"]]}) for entry in content]


def complete_samples(task: AbsTask, result: TaskResult, known: list[Sample]) -> list[Sample]:
    """One sample for each split and subset of a result, or none at all if one of them cannot be resampled.

    Args:
        task: Whose result it is.
        result: mteb's, with the scores of single experiments and clusterings where it has them.
        known: Samples taken while the task ran; they go before those of the result.
    """
    by_place = {(sample.split, sample.subset): sample for sample in known}
    samples = []
    for split, entries in result.scores.items():
        for entry in entries:
            place = split, entry["hf_subset"]
            sample = by_place.get(place) or _from_entry(*place, entry, task.metadata.main_score)
            if sample is None or len(sample) < 2:
                return []
            samples.append(sample)
    return samples


def _from_entry(split: str, subset: str, entry: Mapping[str, Any], metric: str) -> Sample | None:
    """Scores that mteb gives one by one: clusterings, and experiments with a classifier."""
    if metric == "v_measure" and "v_measures" in entry:
        levels = entry["v_measures"]
        values = [value for level in levels.values() for value in level] if isinstance(levels, dict) else levels
        return Sample(split, subset, "clustering", "mean", [np.asarray(values, dtype=float)])
    experiments = entry.get("scores_per_experiment", ())
    if experiments and all(scores.get(metric) is not None for scores in experiments):
        return Sample(split, subset, "experiment", "mean", [np.array([scores[metric] for scores in experiments])])
    return None


def samples_from_predictions(task: AbsTask, folder: Path) -> Iterator[Sample]:
    """Samples of what mteb saved as ``prediction_folder``, for the kinds of tasks of :func:`has_predictions`.

    Args:
        task: The task, with its data.
        folder: Where mteb saved.
    """
    path = folder / task.prediction_file_name
    if not path.exists():
        return
    subsets = json.loads(path.read_text(encoding="utf-8"))
    subsets.pop("mteb_model_meta", None)
    for subset, splits in subsets.items():
        for split, predictions in splits.items():
            if sample := _from_predictions(task, split, subset, predictions):
                yield sample


def has_predictions(task: AbsTask) -> bool:
    """Whether mteb's predictions for this task are small, and enough for its main score."""
    from mteb import abstasks

    metric = task.metadata.main_score
    if isinstance(task, abstasks.AbsTaskSTS):
        return metric in _CORRELATIONS
    if isinstance(task, abstasks.AbsTaskPairClassification):
        return metric.rpartition("_")[2] in _PAIR_STATISTICS and metric.rpartition("_")[0] in _PAIR_SCORES
    if isinstance(task, abstasks.AbsTaskMultilabelClassification):
        return False
    return isinstance(task, abstasks.AbsTaskClassification) and metric == "accuracy" and not task.is_cross_validation


_CORRELATIONS: dict[str, tuple[str, Statistic]] = {
    "spearman": ("similarity_scores", "spearman"),
    "pearson": ("similarity_scores", "pearson"),
    "cosine_spearman": ("cosine_scores", "spearman"),
    "cosine_pearson": ("cosine_scores", "pearson"),
}
_PAIR_STATISTICS: dict[str, Statistic] = {"accuracy": "best_accuracy", "ap": "average_precision"}
#: Score by prefix of the metric, with the sign that makes more mean closer.
_PAIR_SCORES: dict[str, list[tuple[str, int]]] = {
    "similarity": [("similarity_scores", 1)],
    "cosine": [("cosine_scores", 1)],
    "manhattan": [("manhattan_distances", -1)],
    "euclidean": [("euclidean_distances", -1)],
    "dot": [("dot_scores", 1)],
}
_PAIR_SCORES["max"] = [column for columns in _PAIR_SCORES.values() for column in columns]


def _from_predictions(task: Any, split: str, subset: str, predictions: Any) -> Sample | None:
    from mteb import abstasks

    data = (task.dataset if subset == "default" and subset not in task.dataset else task.dataset[subset])[split]
    metric = task.metadata.main_score
    if isinstance(task, abstasks.AbsTaskSTS):
        column, statistic = _CORRELATIONS[metric]
        arrays = [np.asarray(data["score"], dtype=float), np.asarray(predictions[column])]
        return Sample(split, subset, "pair", statistic, arrays)
    if isinstance(task, abstasks.AbsTaskPairClassification):
        kind, _, name = metric.rpartition("_")
        # Some datasets hold all their pairs in one row.
        labels = data[0][task.label_column_name] if len(data) == 1 else data[task.label_column_name]
        scores = np.stack([sign * np.asarray(predictions[column]) for column, sign in _PAIR_SCORES[kind]], axis=1)
        return Sample(split, subset, "pair", _PAIR_STATISTICS[name], [np.asarray(labels), scores])
    right = np.asarray(predictions) == np.asarray(data[task.label_column_name])
    return Sample(split, subset, "text", "mean", [right.mean(axis=0)])


def query_sample(split: str, subset: str, scores: Mapping[str, Mapping[str, float]], metric: str) -> Sample | None:
    """The sample of a retrieval or reranking task.

    Args:
        split: Its split.
        subset: Its subset.
        scores: By query and by pytrec_eval's names, as mteb gives them to ``task_specific_scores``.
        metric: mteb's name of the main score, such as ``"ndcg_at_10"``.
    """
    name, _, cut = metric.partition("_at_")
    column = f"{_TREC_NAMES.get(name, name)}_{cut}"
    queries = sorted(scores)
    if not queries or column not in scores[queries[0]]:
        return None
    return Sample(split, subset, "query", "mean", [np.array([scores[query][column] for query in queries])])


_TREC_NAMES = {"ndcg": "ndcg_cut", "map": "map_cut", "precision": "P", "hit_rate": "success"}
