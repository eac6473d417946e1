"""Small mteb tasks over the texts of the package, one of each type, without a network."""

from __future__ import annotations

import numpy as np
from datasets import Dataset, DatasetDict
from mteb import TaskMetadata, abstasks
from mteb.abstasks.aggregate_task_metadata import AggregateTaskMetadata
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.abstasks.clustering_legacy import AbsTaskClusteringLegacy

from st_reba.data.demo import demo_pairs, demo_questions
from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation import OddOneOutEvaluator

CHINESE, ENGLISH = (read_pairs(demo_pairs(language)) for language in ("zh", "en"))
PAIRS = Pairs(*(getattr(CHINESE, side)[:20] + getattr(ENGLISH, side)[:20] for side in ("first", "second", "scores")))
QUESTIONS = [
    question
    for language in ("zh", "en")
    for question in OddOneOutEvaluator.from_csv(demo_questions(language)).questions[:6]
]
LANGUAGES = ["cmn-Hans", "eng-Latn"]


def metadata(name: str, kind: str, main_score: str, splits=("test",), languages=LANGUAGES) -> TaskMetadata:
    return TaskMetadata(
        name=name, description="Made of the demo texts.", dataset={"path": f"local/{name}", "revision": "1"}, type=kind,
        category="t2t", modalities=["text"], eval_splits=list(splits), eval_langs=languages, main_score=main_score,
    )  # fmt: skip


class Local:
    """Loads what ``splits`` makes."""

    loads = 0

    def load_data(self, num_proc=None, **kwargs):
        if not self.data_loaded:
            type(self).loads += 1
            self.dataset = self.splits()
            self.data_loaded = True


class DemoSTS(Local, abstasks.AbsTaskSTS):
    """Two splits in each of two languages, whose scores have to be averaged."""

    metadata = metadata(
        "DemoSTS", "STS", "cosine_spearman", ("validation", "test"), {"zh": ["cmn-Hans"], "en": ["eng-Latn"]}
    )
    rows = Dataset.from_dict({"sentence1": PAIRS.first, "sentence2": PAIRS.second, "score": PAIRS.scores})

    def splits(self):
        return {
            name: DatasetDict(
                validation=self.rows.select(range(start, start + 20, 2)),
                test=self.rows.select(range(start + 1, start + 20, 2)),
            )
            for name, start in (("zh", 0), ("en", 20))
        }


class DemoSTSInOneSplit(DemoSTS):
    """For what does not depend on how many scores are averaged."""

    metadata = metadata("DemoSTSInOneSplit", "STS", "cosine_spearman")

    def splits(self):
        return DatasetDict(test=self.rows)


class DemoPairs(Local, abstasks.AbsTaskPairClassification):
    metadata = metadata("DemoPairs", "PairClassification", "max_accuracy")

    def splits(self):
        labels = [int(score >= 2.5) for score in PAIRS.scores]
        columns = {"sentence1": PAIRS.first, "sentence2": PAIRS.second, "labels": labels}
        return DatasetDict(test=Dataset.from_dict(columns))


class DemoPairsInOneRow(DemoPairs):
    metadata = metadata("DemoPairsInOneRow", "PairClassification", "euclidean_ap")

    def splits(self):
        rows = super().splits()["test"]
        return DatasetDict(test=Dataset.from_dict({name: [list(rows[name])] for name in rows.column_names}))


class DemoClassification(Local, abstasks.AbsTaskClassification):
    metadata = metadata("DemoClassification", "Classification", "accuracy")
    samples_per_label = 4
    n_experiments = 2

    def splits(self):
        texts = PAIRS.texts()[::3]
        rows = Dataset.from_dict({"text": texts, "label": [int(not text.isascii()) for text in texts]})
        return DatasetDict(train=rows.select(range(0, len(rows), 2)), test=rows.select(range(1, len(rows), 2)))


class DemoClustering(Local, abstasks.AbsTaskClustering):
    """Draws at random from a state that moves on: each variant has to meet the same one."""

    metadata = metadata("DemoClustering", "Clustering", "v_measure")
    max_fraction_of_documents_to_embed = 0.8
    max_documents_per_cluster = 40
    n_clusters = 4

    def splits(self):
        texts = [sentence for question in QUESTIONS for sentence in question.sentences]
        labels = [question.word for question in QUESTIONS for _ in question.sentences]
        return DatasetDict(test=Dataset.from_dict({"sentences": texts, "labels": labels}))


class DemoClusteringSets(DemoClustering, AbsTaskClusteringLegacy):  # type: ignore[misc]
    metadata = metadata("DemoClusteringSets", "Clustering", "v_measure")
    _evaluate_subset = AbsTaskClusteringLegacy._evaluate_subset

    def splits(self):
        rows = super().splits()["test"]
        sets = [rows[start : start + 12] for start in range(0, 48, 12)]
        columns = {name: [part[name] for part in sets] for name in ("sentences", "labels")}
        return DatasetDict(test=Dataset.from_dict(columns))


class DemoRetrieval(Local, abstasks.AbsTaskRetrieval):
    """Find the other half of each pair that means much the same."""

    metadata = metadata("DemoRetrieval", "Retrieval", "ndcg_at_10")
    k_values = (1, 10, 1000)
    alike = tuple(index for index, score in enumerate(PAIRS.scores) if score >= 4)
    top_ranked: dict[str, list[str]] | None = None

    def splits(self):
        rows = [{"id": f"d{index}", "text": text, "title": ""} for index, text in enumerate(PAIRS.second)]
        found = {
            "corpus": Dataset.from_list(rows),
            "queries": Dataset.from_list([{"id": f"q{index}", "text": PAIRS.first[index]} for index in self.alike]),
            "relevant_docs": {f"q{index}": {f"d{index}": 1} for index in self.alike},
            "top_ranked": self.top_ranked,
        }
        return {"default": {"test": found}}


class DemoReranking(DemoRetrieval):
    metadata = metadata("DemoReranking", "Reranking", "map_at_1000")
    others = np.random.default_rng(0).integers(len(PAIRS), size=(len(DemoRetrieval.alike), 8))
    top_ranked = {
        f"q{index}": sorted({f"d{each}" for each in [index, *drawn]})
        for index, drawn in zip(DemoRetrieval.alike, others, strict=True)
    }


class DemoNowhere(abstasks.AbsTaskSTS):
    """Its data is on no Hub."""

    metadata = metadata("DemoNowhere", "STS", "cosine_spearman")


TASKS = (
    DemoSTS, DemoPairs, DemoPairsInOneRow, DemoClassification, DemoClustering, DemoClusteringSets, DemoRetrieval,
    DemoReranking,
)  # fmt: skip


class DemoAll(AbsTaskAggregate):
    """The mean of two others."""

    metadata = AggregateTaskMetadata(
        name="DemoAll", description="Made of the demo texts.", type="STS", modalities=["text"], eval_splits=["test"],
        eval_langs=LANGUAGES, main_score="main_score", tasks=[DemoReranking(), DemoClustering()],
    )  # fmt: skip
