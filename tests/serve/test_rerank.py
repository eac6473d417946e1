"""``/rerank``: by a CrossEncoder, or by the similarity of vectors."""

from __future__ import annotations

import numpy as np
import pytest
from sentence_transformers import CrossEncoder

from st_reba.serve.batches import Limits
from st_reba.serve.models import Embedder, Reranker, check_kind, load_reranker

from ..backbones import TEXTS

QUERY = "Who chased the mouse?"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_the_scores_are_predicts(client, reranker, path):
    answer = client.post(path, json={"model": "my-reranker", "query": QUERY, "documents": [*TEXTS, TEXTS[0]]})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    expected = reranker.predict([(QUERY, text) for text in [*TEXTS, TEXTS[0]]])
    # Of equal scores the first stays the first.
    assert [row["index"] for row in results] == [*np.argsort(-expected, kind="stable")]
    np.testing.assert_allclose([row["relevance_score"] for row in results], -np.sort(-expected), atol=1e-6)
    assert np.ptp(expected) > 1e-4
    assert all(row.keys() == {"index", "relevance_score"} for row in results)
    assert answer.json()["usage"]["total_tokens"] > len(TEXTS)


def test_the_first_with_their_texts(client, reranker):
    documents = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
    given = {"model": "my-reranker", "query": QUERY, "documents": documents, "top_n": 2, "return_documents": True}
    results = client.post("/rerank", json=given).json()["results"]
    order = np.argsort(-reranker.predict([(QUERY, text) for text in TEXTS]))[:2]
    assert [(row["index"], row["document"]) for row in results] == [(index, {"text": TEXTS[index]}) for index in order]


def test_without_a_cross_encoder_by_similarity(client_of, model):
    client = client_of(Embedder("m", model))
    results = client.post("/rerank", json={"model": "m", "query": QUERY, "documents": TEXTS}).json()["results"]
    expected = model.similarity(model.encode_query(QUERY), model.encode_document(TEXTS))[0]
    assert [row["index"] for row in results] == expected.argsort(descending=True).tolist()
    scores = [row["relevance_score"] for row in results]
    np.testing.assert_allclose(scores, expected.sort(descending=True).values, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"documents": []}, "'documents' is not what"),
        ({"documents": ["a", {"no": 1}]}, "'documents'[1] is not what it should be: give a list of texts"),
        ({"documents": ["a"] * 6}, "'documents' has 6, and a request may have 5"),
        ({"top_n": 0}, "'top_n': input should be greater than or equal to 1."),
        ({"query": None}, "'query': input should be a valid string."),
        ({"model": "m:query"}, '/rerank reads queries and documents by itself: give "m"'),
        ({"model": "no"}, 'There is no model "no" here'),
    ],
)
def test_what_is_no_request(client_of, model, given, said):
    client = client_of(Embedder("m", model), limits=Limits(inputs=5))
    answer = client.post("/rerank", json={"model": "m", "query": QUERY, "documents": ["a"], **given})
    assert answer.status_code in (400, 404)
    assert said in answer.json()["error"]["message"]


def test_what_is_no_reranker(saved, reranker_path):
    """The kind of model is told before it is loaded."""
    with pytest.raises(ValueError, match="is a saved CrossEncoder; it orders texts: give it as --rerank"):
        check_kind(reranker_path, None, "SentenceTransformer")
    with pytest.raises(ValueError, match="is a saved SentenceTransformer; it gives vectors: give it as MODEL"):
        load_reranker("m", saved, None, "cpu", "float32", True)
    model = CrossEncoder(reranker_path, num_labels=1, device="cpu")
    model.model.config.num_labels = 3
    with pytest.raises(ValueError, match="gives 3 scores a pair"):
        Reranker("m", model)


def test_long_queries_and_documents_are_tokenised_no_further_than_read(client_of, reranker, monkeypatch):
    own = Reranker("r", reranker)
    ran = []
    way = own.ways[""]
    monkeypatch.setitem(own.ways, "", way._replace(run=lambda pairs: (ran.extend(pairs), way.run(pairs))[1]))
    long = " ".join(f"{TEXTS[2]} {number}" for number in range(2_000))
    for query, documents in ((QUERY, [long, "a"]), (f"Who? {long}", [TEXTS[0], TEXTS[1]])):
        answer = client_of(reranker=own).post("/rerank", json={"model": "r", "query": query, "documents": documents})
        scores = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
        expected = reranker.predict([(query, document) for document in documents])
        np.testing.assert_allclose([scores[0], scores[1]], expected, atol=1e-6)
    assert max(len(text) for pair in ran for text in pair) < 10 * (reranker.max_seq_length + 256)
    monkeypatch.setattr("st_reba.serve.models.CHARACTERS", 5_000)
    refused = client_of(reranker=own).post("/rerank", json={"model": "r", "query": " " * 90_000, "documents": ["a"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "query")
    assert refused.json()["error"]["message"].startswith("'query' has 90,000 characters")
