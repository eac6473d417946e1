"""mteb, given a plain ``SentenceTransformer``."""

from __future__ import annotations

import mteb
import pytest
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval, AbsTaskSTS
from scipy.stats import spearmanr

from ..backbones import TEXTS

QUERIES = ["What is language processing?", "Who chased the mouse?"]
SCORES = [1.0, 2.5, 4.0, 0.0, 3.0]


def metadata(name: str, kind: str, main_score: str) -> mteb.TaskMetadata:
    return mteb.TaskMetadata(
        name=name,
        description="A few sentences.",
        dataset={"path": f"local/{name}", "revision": "1"},
        type=kind,
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=main_score,
    )


class TinySTS(AbsTaskSTS):
    metadata = metadata("TinySTS", "STS", "cosine_spearman")

    def load_data(self, *args, **kwargs):
        rows = {"sentence1": TEXTS, "sentence2": TEXTS[::-1], "score": SCORES}
        self.dataset = {"test": Dataset.from_dict(rows)}
        self.data_loaded = True


class TinyRetrieval(AbsTaskRetrieval):
    """Each query has one right document: the ``right``-th of those."""

    metadata = metadata("TinyRetrieval", "Retrieval", "ndcg_at_1")
    right: list[int]

    def load_data(self, *args, **kwargs):
        documents = [{"id": f"d{index}", "title": "", "text": text} for index, text in enumerate(TEXTS)]
        queries = [{"id": f"q{index}", "text": text} for index, text in enumerate(QUERIES)]
        split = {
            "corpus": Dataset.from_list(documents),
            "queries": Dataset.from_list(queries),
            "relevant_docs": {f"q{query}": {f"d{index}": 1} for query, index in enumerate(self.right)},
            "top_ranked": None,
        }
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


def main_score(model, task) -> float:
    results = mteb.evaluate(model, [task], cache=None, co2_tracker=False, show_progress_bar=False)
    return results.task_results[0].get_score()


def test_sts(own):
    similarities = own.similarity_pairwise(own.encode(TEXTS), own.encode(TEXTS[::-1]))
    assert main_score(own, TinySTS()) == pytest.approx(spearmanr(similarities, SCORES).statistic, abs=1e-6)


@pytest.mark.parametrize(("right", "score"), [("argmax", 1.0), ("argmin", 0.0)])
def test_retrieval_takes_the_prompts_that_are_saved(own, right, score):
    similarities = own.similarity(own.encode_query(QUERIES), own.encode_document(TEXTS))
    task = TinyRetrieval()
    task.right = getattr(similarities, right)(dim=1).tolist()
    assert main_score(own, task) == score
