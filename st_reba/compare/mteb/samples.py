"""What an mteb score is made of, item by item, and how sure that makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...evaluation.bootstrap import Items, Kind, Splits
from ...files import atomic_file

if TYPE_CHECKING:
    from mteb import AbsTask, TaskResult


@dataclass(frozen=True)
class Sample:
    """The items behind one split's score (one language's, where a task has several).

    A task's score is the mean of the scores of its samples.

    Attributes:
        split: The split's name, such as ``"test"``.
        subset: mteb's name of the language or part, such as ``"default"``.
        unit: What an item is: a pair, a text, a query, an experiment (one of mteb's training draws) or a clustering.
        statistic: Makes the score of the items: the mean of ``values``; their correlation with ``labels``; the accuracy
            at the best threshold, or the average precision, of the best of several similarities.
        values: One number an item, (n,), or as many as there are similarities, (n, similarities).
        labels: (n,), where the statistic needs them.
    """

    split: str
    subset: str
    unit: Literal["pair", "text", "query", "experiment", "clustering"]
    statistic: Kind
    values: np.ndarray
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.values)


def score_items(samples: Mapping[str, Sequence[Sample]]) -> Splits:
    """The main score: the mean of the scores of all splits, each resampled by itself.

    Args:
        samples: By variant; each has the same splits, with the same items.
    """
    parts = []
    for alike in zip(*samples.values(), strict=True):
        values = {
            variant: np.asarray(own.values, dtype=np.float64) for variant, own in zip(samples, alike, strict=True)
        }
        labels = alike[0].labels
        if labels is None:
            parts.append(Items("mean", values))
        else:
            classes = alike[0].statistic in ("average_precision", "best_accuracy")
            parts.append(Items(alike[0].statistic, values, (labels == 1 if classes else labels).astype(np.float64)))
    return Splits(parts)


def write_samples(samples: list[Sample], path: Path) -> None:
    """Write as JSON; the file takes its place when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as stream:
        stream.write(json.dumps(list(map(asdict, samples)), default=np.ndarray.tolist).encode())


def read_samples(path: Path) -> list[Sample]:
    """What :func:`write_samples` wrote; nothing if there is no such file."""
    if not path.exists():
        return []
    return [Sample(**entry) for entry in json.loads(path.read_text(encoding="utf-8"), object_hook=_with_arrays)]


def _with_arrays(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: np.asarray(value) if isinstance(value, list) else value for key, value in entry.items()}


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
        return Sample(split, subset, "clustering", "mean", np.asarray(values, dtype=float))
    experiments = entry.get("scores_per_experiment", ())
    if experiments and all(scores.get(metric) is not None for scores in experiments):
        return Sample(split, subset, "experiment", "mean", np.array([scores[metric] for scores in experiments]))
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


_CORRELATIONS: dict[str, tuple[str, Kind]] = {
    "spearman": ("similarity_scores", "spearman"),
    "pearson": ("similarity_scores", "pearson"),
    "cosine_spearman": ("cosine_scores", "spearman"),
    "cosine_pearson": ("cosine_scores", "pearson"),
}
_PAIR_STATISTICS: dict[str, Kind] = {"accuracy": "best_accuracy", "ap": "average_precision"}
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
        labels = np.asarray(data["score"], dtype=float)
        return Sample(split, subset, "pair", statistic, np.asarray(predictions[column]), labels)
    if isinstance(task, abstasks.AbsTaskPairClassification):
        kind, _, name = metric.rpartition("_")
        # Some datasets hold all their pairs in one row.
        labels = np.asarray(data[0][task.label_column_name] if len(data) == 1 else data[task.label_column_name])
        scores = np.stack([sign * np.asarray(predictions[column]) for column, sign in _PAIR_SCORES[kind]], axis=1)
        return Sample(split, subset, "pair", _PAIR_STATISTICS[name], scores, labels)
    right = np.asarray(predictions) == np.asarray(data[task.label_column_name])
    return Sample(split, subset, "text", "mean", right.mean(axis=0))


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
    return Sample(split, subset, "query", "mean", np.array([scores[query][column] for query in queries]))


_TREC_NAMES = {"ndcg": "ndcg_cut", "map": "map_cut", "precision": "P", "hit_rate": "success"}
