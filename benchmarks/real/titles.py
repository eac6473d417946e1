"""Titles of news, to classify and to cluster, as tasks of mteb."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset, DatasetDict
from mteb import AbsTask, TaskMetadata
from mteb.abstasks import AbsTaskClassification, AbsTaskClustering

from .sets import Sets


def _rows(titles: Sequence[tuple[str, str]]) -> Dataset:
    classes = sorted({kind for _, kind in titles})
    return Dataset.from_dict(
        {"text": [text for text, _ in titles], "label": [classes.index(kind) for _, kind in titles]}
    )


def _metadata(name: str, kind: Any, metric: str) -> TaskMetadata:
    return TaskMetadata(
        name=name, description="Titles of news.", dataset={"path": f"local/{name}", "revision": "1"}, type=kind,
        category="t2t", modalities=["text"], eval_splits=["test"], eval_langs=["cmn-Hans"], main_score=metric,
    )  # fmt: skip


class TNews(AbsTaskClassification):
    """Logistic regression on mteb's few training titles a class, ten times."""

    metadata = _metadata("TNews", "Classification", "accuracy")

    def __init__(self, sets: Sets) -> None:
        super().__init__()
        self.dataset = DatasetDict(train=_rows(sets.titles("tnews_train")), test=_rows(sets.titles("tnews_test")))
        self.data_loaded = True

    def _calculate_scores(self, y_test: Any, y_pred: Any) -> Any:
        # A lazy column, which each of many metrics would read from the file again.
        return super()._calculate_scores(list(y_test), y_pred)


class THUCNews(AbsTaskClustering):
    metadata = _metadata("THUCNews", "Clustering", "v_measure")
    # mteb's own fraction, 4%, is meant for larger sets.
    max_fraction_of_documents_to_embed = 1.0

    def __init__(self, sets: Sets) -> None:
        super().__init__()
        titles = _rows(sets.titles("thucnews_titles")).rename_columns({"text": "sentences", "label": "labels"})
        self.dataset = DatasetDict(test=titles)
        self.data_loaded = True


#: By name, with the lists that their texts are in and how their score is called.
TASKS: dict[str, tuple[Callable[[Sets], AbsTask], tuple[str, ...], str]] = {
    "TNews": (TNews, ("tnews-train", "tnews-test"), "accuracy"),
    "THUCNews": (THUCNews, ("thucnews-titles",), "v-measure"),
}
