"""``/v1/embeddings``: what OpenAI's clients send, and what they get."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from st_reba.serve.models import Embedder

from ..backbones import TEXTS


def vectors(answer):
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [row["index"] for row in data] == [*range(len(data))]
    return np.float32([row["embedding"] for row in data])


@pytest.fixture
def embed(client):
    return lambda given, **more: client.post("/v1/embeddings", json={"model": "my-model", "input": given, **more})


def test_texts(embed, model):
    answer = embed([*TEXTS, ""])
    assert np.array_equal(vectors(answer)[:-1], model.encode(TEXTS))
    assert not vectors(answer)[-1].any()
    assert {key: answer.json()[key] for key in ("object", "model")} == {"object": "list", "model": "my-model"}
    assert np.array_equal(vectors(embed(TEXTS[1])), model.encode(TEXTS[1:2]))


def test_tokens(embed, model, token_ids):
    """Special tokens at the ends are the model's own to add."""
    given = [token_ids(text) for text in TEXTS]
    assert np.array_equal(vectors(embed(given)), model.encode(TEXTS))
    assert np.array_equal(vectors(embed([*given[0], model.tokenizer.eos_token_id])), model.encode(TEXTS[:1]))


def test_base64(embed):
    (row,) = embed(TEXTS[0], encoding_format="base64").json()["data"]
    assert np.array_equal(np.frombuffer(base64.b64decode(row["embedding"]), "<f4"), vectors(embed(TEXTS[0]))[0])


@pytest.mark.parametrize("dimensions", [1, 7, 32])
def test_dimensions(embed, model, dimensions):
    expected = model.encode(TEXTS, truncate_dim=dimensions, normalize_embeddings=True)
    np.testing.assert_allclose(vectors(embed(TEXTS, dimensions=dimensions)), expected, rtol=0, atol=1e-7)


def test_queries_documents_and_prompts(embed, model, client_of, monkeypatch):
    expected = {"query": model.encode_query(TEXTS), "document": model.encode_document(TEXTS)}
    assert not np.allclose(expected["query"], expected["document"])
    asked = {"query": ["query", "search_query"], "document": ["document", "search_document", "passage"]}
    for way, names in asked.items():
        assert np.array_equal(vectors(embed(TEXTS, model=f"my-model:{way}")), expected[way])
        for name in names:
            assert np.array_equal(vectors(embed(TEXTS, input_type=name)), expected[way])
    monkeypatch.setitem(model.prompts, "topic", "What is this about? ")
    answer = client_of(Embedder("m", model)).post("/v1/embeddings", json={"model": "m:topic", "input": TEXTS})
    assert np.array_equal(vectors(answer), model.encode(TEXTS, prompt_name="topic"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "The model could not run this (TypeError)."),
        (np.nan, "The model's vector of this text has values that are no numbers."),
    ],
)
def test_a_text_that_cannot_be_run_is_an_error(client_of, model, monkeypatch, value, said):
    client = client_of(Embedder("m", model))
    forward = type(model[0]).forward

    def fails(features):
        found = forward(model[0], features)
        return {**found, "token_embeddings": found["token_embeddings"] * value}

    with monkeypatch.context() as patched:
        patched.setattr(model[0], "forward", fails)
        answer = client.post("/v1/embeddings", json={"model": "m", "input": ["a", "b"]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert answer.json()["error"]["message"] == said
    good = client.post("/v1/embeddings", json={"model": "m", "input": ["a"]})
    assert np.array_equal(vectors(good), model.encode(["a"]))


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_of_a_long_text_no_more_is_tokenised_than_is_read(client_of, model, monkeypatch, token_ids, kind):
    embedder = Embedder("m", model)
    client = client_of(embedder)
    ran = []
    way = embedder.ways[""]
    monkeypatch.setitem(embedder.ways, "", way._replace(run=lambda texts: (ran.extend(texts), way.run(texts))[1]))
    text = " ".join(f"{TEXTS[2]} {number}" for number in range(4_000))
    ids = token_ids(text)
    given = ["a", text] if kind == "text" else ids
    answer = client.post("/v1/embeddings", json={"model": "m", "input": given})
    read = model[0].max_seq_length
    assert len(ids) > 100 * read
    assert max(map(len, ran)) < 10 * (read + 256)
    assert np.array_equal(vectors(answer)[-1:], model.encode([text]))
    tokens = read + (len(token_ids("a")) if kind == "text" else 0)
    assert answer.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    whole = client_of(Embedder("m", model, truncate=False))
    refused = whole.post("/v1/embeddings", json={"model": "m", "input": given})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    where = "'input'[1]" if kind == "text" else "'input'[0]"
    said = f"{where} has {len(ids)} tokens, and the model reads {read}: send it in parts."
    assert refused.json()["error"]["message"] == said
