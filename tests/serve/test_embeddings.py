"""``/v1/embeddings``: what OpenAI's clients send, and what they get."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from st_reba.serve.models import Embedder

from ..backbones import TEXTS
from ..conftest import PROMPTS


def vectors(answer):
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [row["index"] for row in data] == [*range(len(data))]
    return np.float32([row["embedding"] for row in data])


@pytest.fixture
def embed(client):
    return lambda given, **more: client.post("/v1/embeddings", json={"model": "my-model", "input": given, **more})


def test_texts(embed, model):
    answer = embed(TEXTS)
    assert np.array_equal(vectors(answer), model.encode(TEXTS))
    assert {key: answer.json()[key] for key in ("object", "model")} == {"object": "list", "model": "my-model"}


def test_one_text(embed, model):
    assert np.array_equal(vectors(embed(TEXTS[1])), model.encode(TEXTS[1:2]))


def test_usage_counts_the_tokens_that_are_read(embed, model, token_ids):
    text, long = TEXTS[0], TEXTS[2] * 50
    read = len(token_ids(text)) + model[0].max_seq_length
    assert embed([text, long]).json()["usage"] == {"prompt_tokens": read, "total_tokens": read}


@pytest.mark.parametrize("many", [False, True])
def test_tokens(embed, model, token_ids, many):
    given = [token_ids(text) for text in TEXTS] if many else token_ids(TEXTS[0])
    assert np.array_equal(vectors(embed(given)), model.encode(TEXTS if many else TEXTS[:1]))


def test_special_tokens_at_the_ends_are_the_models_own_to_add(embed, model, token_ids):
    end = model.tokenizer.eos_token_id
    assert np.array_equal(vectors(embed([*token_ids(TEXTS[0]), end])), model.encode(TEXTS[:1]))


def test_base64(embed):
    (row,) = embed(TEXTS[0], encoding_format="base64").json()["data"]
    assert np.array_equal(np.frombuffer(base64.b64decode(row["embedding"]), "<f4"), vectors(embed(TEXTS[0]))[0])


@pytest.mark.parametrize("dimensions", [1, 7, 32])
def test_dimensions(embed, model, dimensions):
    expected = model.encode(TEXTS, truncate_dim=dimensions, normalize_embeddings=True)
    np.testing.assert_allclose(vectors(embed(TEXTS, dimensions=dimensions)), expected, rtol=0, atol=1e-7)


def test_queries_and_documents(embed, model):
    expected = {"query": model.encode_query(TEXTS), "document": model.encode_document(TEXTS)}
    assert not np.allclose(expected["query"], expected["document"])
    asked = {"query": ["query", "search_query"], "document": ["document", "search_document", "passage"]}
    for way, names in asked.items():
        assert np.array_equal(vectors(embed(TEXTS, model=f"my-model:{way}")), expected[way])
        for name in names:
            assert np.array_equal(vectors(embed(TEXTS, input_type=name)), expected[way])


def test_a_prompt_by_its_name(client_of, model):
    model.prompts["topic"] = "What is this about? "
    try:
        client = client_of(Embedder("m", model))
        expected = model.encode(TEXTS, prompt_name="topic")
        answer = client.post("/v1/embeddings", json={"model": "m:topic", "input": TEXTS})
        assert np.array_equal(vectors(answer), expected)
    finally:
        del model.prompts["topic"]
    assert model.prompts == PROMPTS


def test_a_text_too_long_is_cut_or_refused(client_of, model, token_ids):
    text = TEXTS[2] * 50
    given = {"model": "m", "input": ["a", text]}
    assert np.array_equal(
        vectors(client_of(Embedder("m", model)).post("/v1/embeddings", json=given)), model.encode(["a", text])
    )
    refused = client_of(Embedder("m", model, truncate=False)).post("/v1/embeddings", json=given)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    read = model[0].max_seq_length
    assert f"'input'[1] has {len(token_ids(text))} tokens, and the model reads {read}" in refused.text


def test_an_empty_text(embed):
    assert not vectors(embed(["", "a"]))[0].any()


@pytest.mark.parametrize(
    ("bad", "error"),
    [("a memory error", "RuntimeError"), ("too few", "ValueError"), ("an exit", "RuntimeError")],
)
def test_a_text_that_cannot_be_run_is_an_error(client_of, model, monkeypatch, bad, error):
    embedder = Embedder("m", model)
    client = client_of(embedder)
    way = embedder.ways[""]

    def fails(texts):
        if "a memory error" in texts:
            raise RuntimeError("no memory")
        if "an exit" in texts:
            raise SystemExit
        return way.run(texts)[1:] if "too few" in texts else way.run(texts)

    monkeypatch.setitem(embedder.ways, "", way._replace(run=fails))
    answer = client.post("/v1/embeddings", json={"model": "m", "input": ["a", bad]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert answer.json()["error"]["message"] == f"The model could not run this ({error})."
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
    given = text if kind == "text" else ids
    answer = client.post("/v1/embeddings", json={"model": "m", "input": ["a", given] if kind == "text" else given})
    read = model[0].max_seq_length
    assert len(ids) > 100 * read
    assert max(map(len, ran)) < 10 * (read + 256)
    assert np.array_equal(vectors(answer)[-1:], model.encode([text]))
    assert answer.json()["usage"]["prompt_tokens"] == read + (len(token_ids("a")) if kind == "text" else 0)
    refused = client_of(Embedder("m", model, truncate=False)).post(
        "/v1/embeddings", json={"model": "m", "input": given}
    )
    assert refused.status_code == 400
    said = refused.json()["error"]["message"]
    assert said == f"'input'[0] has {len(ids)} tokens, and the model reads {read}: send it in parts."


def test_values_that_are_no_numbers_are_an_error(client_of, model, monkeypatch):
    client = client_of(Embedder("m", model))
    monkeypatch.setattr(model[0], "forward", lambda features: not_numbers(features))
    forward = type(model[0]).forward

    def not_numbers(features):
        found = forward(model[0], features)
        return {**found, "token_embeddings": found["token_embeddings"] * np.nan}

    answer = client.post("/v1/embeddings", json={"model": "m", "input": "a"})
    assert answer.status_code == 500
    assert "values that are no numbers" in answer.text
