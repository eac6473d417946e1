"""Models that give a text weights of tokens, ``/embed_sparse``, or a vector for each token, ``/embed_all``."""

from __future__ import annotations

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SparseEncoder

from st_reba import EchoModule, PromptRepsModule, ReBAModule
from st_reba.modules.multi_vector import multi_vector_encoder
from st_reba.serve import app as served_app
from st_reba.serve.models import EMBEDDERS, Embedder, MultiVectorEmbedder, Reranker, SparseEmbedder, load_embedder

from ..backbones import DEMO_MODEL, TEXTS
from ..conftest import PROMPTS

QUERY = "Who chased the mouse?"


@pytest.fixture(scope="module")
def sparse():
    module = PromptRepsModule(str(DEMO_MODEL), top_k=5, max_seq_length=100)
    return SparseEncoder(modules=[module], prompts=PROMPTS, device="cpu")


@pytest.fixture(scope="module")
def tokenwise(shallow_path):
    """The same alone and in a batch, to the bit."""
    return multi_vector_encoder(ReBAModule(shallow_path, deterministic=True), prompts=PROMPTS)


def said(answer, status=400):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def weights(found):
    """What an encoder gives, as TEI has it."""
    dense = found.to_dense().numpy()
    return [[{"index": int(index), "value": float(row[index])} for index in np.nonzero(row)[0]] for row in dense]


def test_weights_of_tokens(client_of, sparse):
    client = client_of(SparseEmbedder("m", sparse))
    encoders = {None: sparse.encode, "query": sparse.encode_query, "passage": sparse.encode_document}
    for name, encode in encoders.items():
        given = {"inputs": TEXTS} if name is None else {"inputs": TEXTS, "prompt_name": name}
        answer = client.post("/embed_sparse", json=given)
        assert answer.status_code == 200, answer.text
        for own, expected in zip(answer.json(), weights(encode(TEXTS)), strict=True):
            assert [entry["index"] for entry in own] == [entry["index"] for entry in expected]
            values = [[entry["value"] for entry in row] for row in (own, expected)]
            np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6)
    (one,) = client.post("/embed_sparse", json={"inputs": TEXTS[0]}).json()
    assert 0 < len(one) <= 10


def test_words_behind_what_is_read_are_weighed(client_of, sparse):
    """A text is not cut before its words are known."""
    client = client_of(SparseEmbedder("m", sparse))
    mice = "mouse " * 900
    text = f"{mice}zebra"
    (own,) = client.post("/embed_sparse", json={"inputs": text, "truncate": True}).json()
    (expected,) = weights(sparse.encode([text]))
    assert [entry["index"] for entry in own] == [entry["index"] for entry in expected]
    assert len(own) > len(weights(sparse.encode([mice]))[0])
    count = len(sparse.tokenizer(text, add_special_tokens=False)["input_ids"])
    told = said(client.post("/embed_sparse", json={"inputs": [text], "truncate": False}))
    assert told.startswith(f"'inputs'[0] has {count} tokens, and the model reads ")


@pytest.mark.filterwarnings("ignore:A text without tokens")
def test_a_vector_for_each_token(client_of, tokenwise):
    client = client_of(MultiVectorEmbedder("m", tokenwise))
    encoders = {None: tokenwise.encode, "query": tokenwise.encode_query, "document": tokenwise.encode_document}
    texts = [*TEXTS, "?!"]
    for name, encode in encoders.items():
        answer = client.post("/embed_all", json={"inputs": texts, "prompt_name": name, "truncation_direction": "Right"})
        assert answer.status_code == 200, answer.text
        for own, expected in zip(answer.json(), encode(texts, convert_to_numpy=True), strict=True):
            assert np.array_equal(np.float32(own).reshape(expected.shape), expected)
    # The document's marks have no vector.
    assert answer.json()[-1] == []


@pytest.mark.filterwarnings("ignore:A text without tokens")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["sparse", "tokenwise"])
def test_ordered_by_the_models_own_similarity(client_of, request, kind):
    model = request.getfixturevalue(kind)
    client = client_of(EMBEDDERS[type(model).__name__]("m", model))
    documents = [*TEXTS, "", "?!"]
    answer = client.post("/rerank", json={"model": "m", "query": QUERY, "documents": documents})
    assert answer.status_code == 200, answer.text
    scores = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
    expected = model.similarity(model.encode_query([QUERY]), model.encode_document(documents))[0]
    np.testing.assert_allclose([scores[index] for index in range(len(documents))], expected, rtol=1e-4, atol=1e-6)
    assert [*scores.values()] == sorted(scores.values(), reverse=True)
    assert len(set(scores.values())) > 1


def test_the_path_that_answers_is_named(client_of, model, sparse, tokenwise):
    clients = {
        "/v1/embeddings": client_of(Embedder("m", model)),
        "/embed_sparse": client_of(SparseEmbedder("m", sparse)),
        "/embed_all": client_of(MultiVectorEmbedder("m", tokenwise)),
    }
    for own, client in clients.items():
        for path in clients:
            answer = client.post(path, json={"model": "m", "input": "a"} if path.startswith("/v1") else {"inputs": "a"})
            if path == own:
                assert answer.status_code == 200
            else:
                told = said(answer)
                assert told.startswith(f"{path} gives a text ")
                assert told.endswith(f": send the request to {own}.")


def test_what_is_refused(client_of, tokenwise, reranker, monkeypatch):
    client = client_of(MultiVectorEmbedder("m", tokenwise), keys=["key"])
    assert client.post("/embed_all", json={"inputs": "a"}).status_code == 401
    client.headers["Authorization"] = "Bearer key"
    assert said(client.post("/embed_all", json={"inputs": []})).startswith("'inputs' is not what it should be: give a")
    assert "'prompt_name' is \"no\": this model has" in said(
        client.post("/embed_all", json={"inputs": "a", "prompt_name": "no"})
    )
    assert "'inputs' has 2049" in said(client.post("/embed_all", json={"inputs": ["a"] * 2049}))
    assert said(client.post("/embed_all", json={"inputs": "a", "normalize": True})) == "Unknown parameter: 'normalize'."
    # A text is some values, and here each token.
    monkeypatch.setattr(served_app, "VALUES", 5 * 32)
    told = "The texts have 6 tokens, and with 32 values for each a request may have 5: send several requests."
    assert said(client.post("/embed_all", json={"inputs": ["aaa", "bbb"]})) == told
    assert told in said(client.post("/rerank", json={"model": "m", "query": "a", "documents": ["aaa", "bbb"]}))
    alone = client_of(None, Reranker("r", reranker))
    assert said(alone.post("/embed_all", json={"inputs": "a"}), 404).startswith("There is no model here that gives a")


@pytest.mark.filterwarnings("ignore:A text without tokens")
def test_queries_and_documents_may_have_a_length_of_their_own(backbone_path):
    model = multi_vector_encoder(EchoModule(backbone_path(), query_length=3, document_length=5))
    embedder = MultiVectorEmbedder("m", model, truncate=False)
    assert [embedder.ways[way].limit for way in ("query", "document")] == [3, 5]


def test_loaded_by_what_the_directory_says(sparse, tokenwise, tmp_path):
    for model, kind in ((sparse, SparseEmbedder), (tokenwise, MultiVectorEmbedder)):
        path = str(tmp_path / kind.__name__)
        model.save_pretrained(path, create_model_card=False)
        loaded = load_embedder("m", path, None, "cpu", "float32", True)
        assert type(loaded) is kind
        assert isinstance(loaded.model, SparseEncoder | MultiVectorEncoder)
