"""mteb, given a plain ``SentenceTransformer``."""

from __future__ import annotations

import mteb
import pytest
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval

from ..backbones import TEXTS

QUERIES = ["What is language processing?", "Who chased the mouse?"]


class TinyRetrieval(AbsTaskRetrieval):
    """Each query has one right document: the ``right``-th of those."""

    metadata = mteb.TaskMetadata(
        name="TinyRetrieval",
        description="A few sentences.",
        dataset={"path": "local/TinyRetrieval", "revision": "1"},
        type="Retrieval",
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="ndcg_at_1",
    )
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


@pytest.mark.parametrize(("right", "score"), [("argmax", 1.0), ("argmin", 0.0)])
def test_retrieval_takes_the_prompts_that_are_saved(own, right, score):
    similarities = own.similarity(own.encode_query(QUERIES), own.encode_document(TEXTS))
    task = TinyRetrieval()
    task.right = getattr(similarities, right)(dim=1).tolist()
    results = mteb.evaluate(own, [task], cache=None, co2_tracker=False, show_progress_bar=False)
    assert results.task_results[0].get_score() == score
