"""Rankings: by any of sentence-transformers' models, with a vector a text or a token, fused and scored."""

from __future__ import annotations

import pytest
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from st_reba import ReBAModule
from st_reba.data.tables import Retrieval
from st_reba.evaluation.rankings import ByModel, Fusion, fused, scored
from st_reba.modules.multi_vector import multi_vector_encoder

from ..backbones import TEXTS
from ..conftest import pipeline

DATA = Retrieval(
    {"q": "a dog chased a cat", "r": "语言"},
    {str(number): text for number, text in enumerate(TEXTS)},
    {"q": ("2",), "r": ("0", "1")},
)
#: What sentence-transformers' evaluators are given.
GIVEN = DATA.queries, DATA.documents, {query: set(own) for query, own in DATA.relevant.items()}
MEASURED = {"ndcg_at_k": [10], "precision_recall_at_k": [100], "write_csv": False}
QUERIES, DOCUMENTS = list(DATA.queries.values()), list(DATA.documents.values())


class Fixed:
    """Rankings by hand: for each query the documents' indices."""

    def __init__(self, *rankings):
        self.rankings = rankings
        self.asked = []

    def nearest(self, queries, documents, count):
        self.asked.append(count)
        return [[(index, 1 / (rank + 1)) for rank, index in enumerate(own[:count])] for own in self.rankings]


def test_fusion_counts_ranks_and_not_scores():
    found = fused([[(4, 9.0), (2, 8.0)], [(2, 0.1), (7, 0.05)]])
    assert [index for index, _ in found] == [2, 4, 7]
    assert [score for _, score in found] == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62])


def test_several_rankers_as_one(monkeypatch):
    monkeypatch.setattr("st_reba.evaluation.rankings._FUSED", 2)
    first, second = Fixed([0, 1, 2], [2, 1]), Fixed([1, 3], [2, 0])
    found = Fusion([first, second]).nearest(QUERIES, DOCUMENTS, 3)
    assert [[index for index, _ in hits] for hits in found] == [[1, 0, 3], [2, 1, 0]], "the third does not count"
    assert first.asked == [3]


def test_a_model_ranks_by_its_own_similarity_and_embeds_documents_once(shared):
    model = pipeline(shared())
    calls = []
    encode = model.encode_document
    model.encode_document = lambda texts, **kwargs: calls.append(texts) or encode(texts, **kwargs)
    ranker = ByModel(model)
    found = [ranker.nearest(QUERIES, DOCUMENTS, 3) for _ in range(2)]
    assert len(calls) == 1
    assert found[0] == found[1]
    similarities = model.similarity(model.encode_query(QUERIES), model.encode_document(DOCUMENTS))
    for hits, own in zip(found[0], similarities, strict=True):
        assert [index for index, _ in hits] == own.argsort(descending=True)[:3].tolist()


def test_scores_are_those_of_sentence_transformers(shared):
    model = pipeline(shared())
    ranker = ByModel(model)
    found = scored(DATA, {"dense": ranker, "twice": Fusion([ranker, ranker])})
    wanted = InformationRetrievalEvaluator(*GIVEN, **MEASURED)(model)
    for own in found.values():
        assert own.ndcg.value == pytest.approx(wanted["cosine_ndcg@10"])
        assert own.recall.value == pytest.approx(wanted["cosine_recall@100"])
        assert own.ndcg.low <= own.ndcg.value <= own.ndcg.high


def test_scores_of_multi_vector_models_are_those_of_sentence_transformers(shared):
    late = multi_vector_encoder(ReBAModule(shared()), prompts={"query": "find: "})
    found = scored(DATA, {"late": ByModel(late)})["late"]
    wanted = MultiVectorInformationRetrievalEvaluator(*GIVEN, **MEASURED)(late)
    assert found.ndcg.value == pytest.approx(wanted["maxsim_ndcg@10"])
    assert found.recall.value == pytest.approx(wanted["maxsim_recall@100"])
