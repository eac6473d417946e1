"""``/rerank`` by a model that reads all documents of a request together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from st_reba import AttentionReranker
from st_reba.modules import AttentionRerankModule
from st_reba.modules.attention_reranking import attention_reranker
from st_reba.serve import models
from st_reba.serve.models import ListReranker, Reranker, load_reranker

from ..backbones import TEXTS

QUERIES = ["Who chased the mouse?", "river bank", "a"]


@pytest.fixture(scope="module")
def path(backbone_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("lists") / "my-lists"
    module = AttentionRerankModule(backbone_path(), rotations=2, max_seq_length=12)
    attention_reranker(module, device="cpu").save_pretrained(str(directory))
    return str(directory)


@pytest.fixture(scope="module")
def reranker(path):
    return AttentionReranker(path, device="cpu")


def asked(client, query, documents, **more):
    return client.post("/rerank", json={"model": "r", "query": query, "documents": documents, **more})


def test_the_scores_are_predicts_whatever_else_runs(client_of, path, reranker):
    """Long documents are cut; requests that run at the same time have lists of their own."""
    client = client_of(reranker=load_reranker("r", path, None, "cpu", "float32", True))
    documents = [*TEXTS[:3], " ".join(TEXTS * 40)]
    lists = [(query, documents[: 2 + number % 3]) for number, query in enumerate(QUERIES * 4)]
    with ThreadPoolExecutor(12) as pool:
        answers = [*pool.map(lambda given: asked(client, *given), lists)]
    for (query, own), answer in zip(lists, answers, strict=True):
        assert answer.status_code == 200, answer.text
        expected = reranker.predict([(query, document) for document in own])
        results = answer.json()["results"]
        assert [row["index"] for row in results] == [*np.argsort(-expected, kind="stable")]
        np.testing.assert_allclose([row["relevance_score"] for row in results], -np.sort(-expected), atol=1e-5)
    assert np.ptp(reranker.predict([(QUERIES[0], document) for document in documents])) > 1e-4
    best = asked(client, QUERIES[0], [{"text": text} for text in documents], top_n=1, return_documents=True).json()
    top = int(np.argmax(reranker.predict([(QUERIES[0], document) for document in documents])))
    assert [(row["index"], row["document"]) for row in best["results"]] == [(top, {"text": documents[top]})]
    ids = reranker[0].token_ids([QUERIES[0], *documents])
    assert best["usage"]["total_tokens"] == len(ids[0]) + sum(min(12, len(own)) for own in ids[1:])


def test_what_is_too_long(client_of, path, reranker, monkeypatch):
    """A query is not cut. A document is, if the server may cut."""
    client = client_of(reranker=ListReranker("r", reranker, truncate=False))
    refused = asked(client, QUERIES[0], ["a", " ".join(TEXTS)])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "'documents'[1] has " in refused.json()["error"]["message"]
    assert "tokens, and the model reads 12: send it in parts." in refused.json()["error"]["message"]
    client = client_of(reranker=ListReranker("r", reranker))
    refused = asked(client, "mouse " * 5_000, TEXTS)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "query")
    assert "shorten it" in refused.json()["error"]["message"]
    assert longest_answered(client, reranker) <= 6
    prompted = AttentionReranker(path, device="cpu", prompts={"ask": "the mouse " * 20}, default_prompt_name="ask")
    assert longest_answered(client_of(reranker=ListReranker("r", prompted)), prompted) <= 6
    monkeypatch.setattr(models, "KEPT_VALUES", 1_000)
    refused = asked(client_of(reranker=ListReranker("r", reranker)), "a", TEXTS * 5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    assert "are read together, " in refused.json()["error"]["message"]
    with pytest.raises(ValueError, match="scores the documents of a query together: give it to ListReranker"):
        Reranker("r", reranker)


def longest_answered(client, reranker) -> int:
    """The tokens that the longest query that is answered leaves for a document, one or more."""
    words = next(count for count in range(256, 0, -1) if asked(client, "a " * count, ["a"]).status_code == 200)
    refused = asked(client, "a " * (words + 1), ["a"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "query")
    prompt = reranker.prompts.get(reranker.default_prompt_name)
    features = reranker[0].preprocess([("a " * words, "a")], prompt=prompt)
    used = len(features["front"]) + len(features["separator"]) + len(features["asked"][0][0])
    left = reranker[0].model.config.max_position_embeddings - used
    assert left >= 1
    return left
