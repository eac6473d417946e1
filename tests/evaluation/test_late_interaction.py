"""A multi-vector model on every task: what sentence-transformers' own evaluator says, and the definition."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator

from st_reba import ReBAModule
from st_reba.data.demo import demo_retrieval
from st_reba.data.tables import Pairs, Retrieval, read_data
from st_reba.evaluation.rankings import LateInteraction
from st_reba.evaluation.tasks import task_of
from st_reba.modules.multi_vector import multi_vector_encoder

from ..backbones import TEXTS


@pytest.fixture
def model(shared):
    return multi_vector_encoder(ReBAModule(shared()), prompts={"query": "find: "})


def test_retrieval_is_scored_as_by_sentence_transformers(model):
    whole = read_data(demo_retrieval("en"))
    queries = dict(list(whole.queries.items())[:4])
    wanted = {document for query in queries for document in whole.relevant[query]}
    documents = {
        name: text[:40] for index, (name, text) in enumerate(whole.documents.items()) if name in wanted or index < 20
    }
    data = Retrieval(queries, documents, {query: whole.relevant[query] for query in queries}, {})
    task = task_of(data)
    # Chunks smaller than what is asked for, and larger than the whole.
    measured = [task.measure(LateInteraction(model, chunk_size=size)) for size in (7, 1000)]
    evaluator = MultiVectorInformationRetrievalEvaluator(
        queries,
        documents,
        {query: set(found) for query, found in data.relevant.items()},
        precision_recall_at_k=[100],
        write_csv=False,
    )
    found = evaluator(model)
    for name, metric in (("ndcg", "maxsim_ndcg@10"), ("recall", "maxsim_recall@100")):
        assert measured[0][name].tolist() == measured[1][name].tolist()
        assert measured[0][name].mean() == pytest.approx(found[metric], abs=1e-9)


def test_the_nearest_are_in_falling_order(model):
    queries, documents = TEXTS[:2], [*TEXTS, "我爱你。"]
    expected = model.similarity(model.encode_query(queries), model.encode_document(documents))
    for hits, scores in zip(LateInteraction(model, chunk_size=2).nearest(queries, documents, 4), expected, strict=True):
        best, order = scores.topk(4)
        assert [index for index, _ in hits] == order.tolist()
        assert [score for _, score in hits] == pytest.approx(best.tolist(), abs=1e-5)
    assert LateInteraction(model).nearest(queries, [], 4) == [[], []]


def test_pairs_have_no_query(model):
    first, second = TEXTS[:3], TEXTS[2:]
    similarity = LateInteraction(model)
    cosines = similarity.cosines(first, second)
    assert cosines == pytest.approx(similarity.cosines(second, first), abs=1e-6)
    assert similarity.cosines(TEXTS, TEXTS) == pytest.approx([1.0] * len(TEXTS), abs=1e-5)
    for cosine, one, other in zip(cosines, first, second, strict=True):
        products = model.encode(one) @ model.encode(other).T
        best = [products.max(dim=dim).values.mean() for dim in (0, 1)]
        assert cosine == pytest.approx(float(torch.stack(best).mean()), abs=1e-5)
    assert -1 <= task_of(Pairs(first, second, [1.0, 2.0, 3.0])).score(similarity) <= 1
