"""Small mteb tasks over the texts of the package, one of each type, without a network."""

from __future__ import annotations

import numpy as np
from datasets import Dataset, DatasetDict
from mteb import TaskMetadata
from mteb.abstasks import (
    AbsTaskClassification,
    AbsTaskClustering,
    AbsTaskPairClassification,
    AbsTaskRetrieval,
    AbsTaskSTS,
)
from mteb.abstasks.aggregate_task_metadata import AggregateTaskMetadata
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.abstasks.clustering_legacy import AbsTaskClusteringLegacy

from st_reba.data.demo import demo_pairs, demo_questions
from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation import OddOneOutEvaluator

BY_LANGUAGE = [read_pairs(demo_pairs(language)) for language in ("zh", "en")]
PAIRS = Pairs(
    *([item for pairs in BY_LANGUAGE for item in getattr(pairs, field)[:20]] for field in ("first", "second", "scores"))
)
QUESTIONS = [
    question
    for language in ("zh", "en")
    for question in OddOneOutEvaluator.from_csv(demo_questions(language)).questions[:6]
]
LANGUAGES = ["cmn-Hans", "eng-Latn"]
CHINESE = "\u4e00", "\u9fff"


def metadata(name: str, kind: str, main_score: str, splits=("test",), languages=LANGUAGES) -> TaskMetadata:
    return TaskMetadata(
        name=name,
        description="Made of the demo texts of st_reba.",
        dataset={"path": f"local/{name}", "revision": "1"},
        type=kind,
        category="t2t",
        modalities=["text"],
        eval_splits=list(splits),
        eval_langs=languages,
        main_score=main_score,
    )


def is_chinese(text: str) -> bool:
    return any(CHINESE[0] <= character <= CHINESE[1] for character in text)


class Local:
    """Loads what ``splits`` makes."""

    loads = 0

    def load_data(self, num_proc=None, **kwargs):
        if not self.data_loaded:
            type(self).loads += 1
            self.dataset = self.splits()
            self.data_loaded = True


class DemoSTS(Local, AbsTaskSTS):
    """Two splits in each of two languages, whose scores have to be averaged."""

    metadata = metadata(
        "DemoSTS", "STS", "cosine_spearman", ("validation", "test"), {"zh": ["cmn-Hans"], "en": ["eng-Latn"]}
    )

    def splits(self):
        rows = Dataset.from_dict({"sentence1": PAIRS.first, "sentence2": PAIRS.second, "score": PAIRS.scores})
        chosen = {
            name: [index for index, text in enumerate(PAIRS.first) if is_chinese(text) == (name == "zh")]
            for name in ("zh", "en")
        }
        return {
            name: DatasetDict(validation=rows.select(indices[::2]), test=rows.select(indices[1::2]))
            for name, indices in chosen.items()
        }


class DemoSTSInOneSplit(DemoSTS):
    """For what does not depend on how many scores are averaged."""

    metadata = metadata("DemoSTSInOneSplit", "STS", "cosine_spearman")

    def splits(self):
        columns = {"sentence1": PAIRS.first, "sentence2": PAIRS.second, "score": PAIRS.scores}
        return DatasetDict(test=Dataset.from_dict(columns))


class DemoPairs(Local, AbsTaskPairClassification):
    metadata = metadata("DemoPairs", "PairClassification", "max_accuracy")

    def splits(self):
        labels = [int(score >= 2.5) for score in PAIRS.scores]
        return DatasetDict(
            test=Dataset.from_dict({"sentence1": PAIRS.first, "sentence2": PAIRS.second, "labels": labels})
        )


class DemoPairsInOneRow(DemoPairs):
    metadata = metadata("DemoPairsInOneRow", "PairClassification", "cosine_ap")

    def splits(self):
        rows = super().splits()["test"]
        return DatasetDict(test=Dataset.from_dict({name: [list(rows[name])] for name in rows.column_names}))


class DemoClassification(Local, AbsTaskClassification):
    metadata = metadata("DemoClassification", "Classification", "accuracy")
    samples_per_label = 4
    n_experiments = 2

    def splits(self):
        texts = PAIRS.texts()[::3]
        rows = Dataset.from_dict({"text": texts, "label": [int(is_chinese(text)) for text in texts]})
        return DatasetDict(train=rows.select(range(0, len(rows), 2)), test=rows.select(range(1, len(rows), 2)))


class DemoClassificationF1(DemoClassification):
    metadata = metadata("DemoClassificationF1", "Classification", "f1")


class DemoClustering(Local, AbsTaskClustering):
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


class DemoRetrieval(Local, AbsTaskRetrieval):
    metadata = metadata("DemoRetrieval", "Retrieval", "ndcg_at_10")
    k_values = (1, 10, 1000)

    def splits(self):
        """Find the other half of each pair that means much the same."""
        alike = [index for index, score in enumerate(PAIRS.scores) if score >= 4]
        rows = [{"id": f"d{index}", "text": text, "title": ""} for index, text in enumerate(PAIRS.second)]
        queries = [{"id": f"q{index}", "text": PAIRS.first[index]} for index in alike]
        found = {
            "corpus": Dataset.from_list(rows),
            "queries": Dataset.from_list(queries),
            "relevant_docs": {f"q{index}": {f"d{index}": 1} for index in alike},
            "top_ranked": self.top_ranked(alike),
        }
        return {"default": {"test": found}}

    def top_ranked(self, alike):
        return None


class DemoReranking(DemoRetrieval):
    metadata = metadata("DemoReranking", "Reranking", "map_at_1000")

    def top_ranked(self, alike):
        draw = np.random.default_rng(0)
        others = {index: draw.choice(len(PAIRS), 8, replace=False) for index in alike}
        return {f"q{index}": sorted({f"d{index}", *(f"d{other}" for other in others[index])}) for index in alike}


class DemoNowhere(AbsTaskSTS):
    """Its data is on no Hub."""

    metadata = metadata("DemoNowhere", "STS", "cosine_spearman")


TASKS = (
    DemoSTS,
    DemoPairs,
    DemoPairsInOneRow,
    DemoClassification,
    DemoClassificationF1,
    DemoClustering,
    DemoClusteringSets,
    DemoRetrieval,
    DemoReranking,
)


class DemoAll(AbsTaskAggregate):
    """The mean of two others."""

    metadata = AggregateTaskMetadata(
        name="DemoAll",
        description="Made of the demo texts of st_reba.",
        type="STS",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=LANGUAGES,
        main_score="main_score",
        tasks=[DemoReranking(), DemoClusteringSets()],
    )
