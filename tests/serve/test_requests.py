"""What is refused, in which words; and what operators see."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from st_reba.serve.app import Server, make_app
from st_reba.serve.batches import Limits
from st_reba.serve.models import Embedder, Reranker
from st_reba_cli import app

GOOD = {"model": "my-model", "input": "a"}


def error(answer, status=400):
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"].endswith(".")
    return body["error"]


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"foo": 1}, "foo", "Unknown parameter: 'foo'."),
        ({"x" * 10**6: 1}, "x" * 60, "Unknown parameter: 'xxx"),
        ({"input": []}, "input", "'input' is not what it should be: give a text"),
        ({"input": ["a", 1]}, "input", "'input'[1] is not what it should be: give a text"),
        ({"input": [[[1]]]}, "input", "'input'[0] is not what"),
        ({"input": [10**30]}, "input", "token 0 is huge, and the vocabulary has"),
        ({"input": [[5], [100_257]]}, "input", "'input'[1]: token 0 is 100257"),
        ({"input": ["a"] * 2049}, "input", "'input' has 2049, and a request may have 2048"),
        ({"dimensions": 0}, "dimensions", "'dimensions' is 0: give a number from 1 to 32."),
        ({"dimensions": 10**400}, "dimensions", "'dimensions' is 1000"),
        ({"encoding_format": "int8"}, "encoding_format", "'encoding_format': input should be 'float' or 'base64'"),
        ({"input_type": "no"}, "input_type", "'input_type' is \"no\": this model has \"query\", \"document\""),
        ({"input_type": "query", "model": "my-model:document"}, "input_type", "give one of them"),
    ],
    ids=range(13),
)  # fmt: skip
def test_fields(client, given, param, said):
    told = error(client.post("/v1/embeddings", content=json.dumps({**GOOD, **given})))
    assert said in told["message"]
    assert len(told["message"]) < 300
    assert told["type"] == "invalid_request_error"
    assert told["param"][:40] == param[:40]


def test_a_field_that_is_missing_and_tokens_that_no_text_has(client, token_ids):
    told = error(client.post("/v1/embeddings", json={"model": "my-model"}))
    assert (told["message"], told["param"]) == ("Missing required parameter: 'input'.", "input")
    # Its characters are one token where the tokenizer reads them.
    given = [token for character in "the" for token in token_ids(character)]
    said = error(client.post("/v1/embeddings", json={**GOOD, "input": given}))["message"]
    assert "these are not the tokens that the model's own tokenizer makes of any text" in said


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"\xff\xfe", b'{"model": "my-model", "input": "\\ud800"}',
        b'{"model": "my-model", "input": ' + b"[" * 100_000, b'{"a":' * 100_000,
        b'{"model": "my-model", "input": ' + b"[" * 5000 + b"]" * 5000 + b"}", b"[]", b'"text"', b"1" * 5000,
    ],
    ids=range(10),
)  # fmt: skip
def test_bodies(client, body):
    told = error(client.post("/v1/embeddings", content=body))
    assert told["message"].startswith("The request's body is ")
    assert len(told["message"]) < 300


def test_a_body_that_is_too_large(model):
    server = Server(Embedder("m", model), limits=Limits(body_bytes=1000))
    with TestClient(make_app(server)) as client:
        for size in (1001, 5000, 50_000):
            body = json.dumps({"model": "m", "input": "a" * size})
            assert "larger than the 1,000 bytes" in error(client.post("/v1/embeddings", content=body), 413)["message"]
        # Not told in advance.
        chunks = iter([b"a" * 400] * 10)
        assert "larger than" in error(client.post("/v1/embeddings", content=chunks), 413)["message"]


def test_models_and_paths_that_are_not_there(client):
    told = error(client.post("/v1/embeddings", json={**GOOD, "model": "gpt"}), 404)
    assert told["code"] == "model_not_found"
    assert told["message"] == (
        'There is no model "gpt" here that gives vectors; there is "my-model", "my-model:query", "my-model:document".'
    )
    told = error(client.post("/v1/embeddings", json={**GOOD, "model": "my-reranker"}), 404)
    assert "gives vectors" in told["message"]
    assert "there is no such path" in error(client.get("/no"), 404)["message"]
    assert "the path has another method" in error(client.get("/v1/embeddings"), 405)["message"]
    data = client.get("/v1/models").json()["data"]
    assert [row["id"] for row in data] == ["my-model", "my-model:query", "my-model:document", "my-reranker"]
    assert client.get("/v1/models/my-model:query").json()["id"] == "my-model:query"
    error(client.get("/v1/models/no"), 404)


def test_keys(client_of, model):
    client = client_of(Embedder("my-model", model), keys=["one", "two"])
    for given in (None, "Bearer", "Bearer no", "Basic one", "one", "Bearer onetwo", "Bearer \xe9"):
        headers = {} if given is None else {"authorization": given.encode("latin-1")}
        for asked in ("POST /v1/embeddings", "POST /rerank", "GET /v1/models", "GET /metrics"):
            answer = client.request(*asked.split(), headers=headers)
            assert error(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    for key in ("one", "two"):
        assert client.post("/v1/embeddings", json=GOOD, headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert client.get("/health").status_code == 200


def test_a_connection_too_many(model):
    served = make_app(Server(Embedder("my-model", model)))

    async def too_many(scope, receive, send):
        await served({**scope, "state": {**scope.get("state", {}), "too_many": True}}, receive, send)

    client = TestClient(too_many)
    answer = client.post("/v1/embeddings", json=GOOD)
    assert "has as many connections as it takes, all of them at work: try again" in error(answer, 503)["message"]
    assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
    assert client.get("/health").json() == {"status": "stopped"}


def test_metrics(client_of, model, token_ids, monkeypatch):
    client = client_of(Embedder("my-model", model))
    client.post("/v1/embeddings", json={**GOOD, "input": ["aa", "a"]})
    client.post("/v1/embeddings", json={**GOOD, "input": []})
    client.get("/no/such/path")
    monkeypatch.setattr("st_reba.serve.app._embeddings_answer", lambda *given: 1 / 0)
    assert "its log says how" in error(client.post("/v1/embeddings", json=GOOD), 500)["message"]
    lines = client.get("/metrics").text.splitlines()
    for line in (
        'st_reba_requests_total{path="/v1/embeddings",status="200"} 1.0',
        'st_reba_requests_total{path="/v1/embeddings",status="400"} 1.0',
        'st_reba_requests_total{path="other",status="404"} 1.0',
        'st_reba_requests_total{path="/v1/embeddings",status="500"} 1.0',
        'st_reba_request_seconds_count{path="/v1/embeddings"} 3.0',
        f"st_reba_tokens_total {len(token_ids('aa')) + 2}.0",
        "st_reba_batch_texts_sum 3.0",
        "st_reba_batch_seconds_count 2.0",
        "st_reba_waiting_texts 0.0",
    ):
        assert line in lines


def test_what_waits_to_be_tokenised_counts(client_of, model, monkeypatch):
    embedder = Embedder("my-model", model)
    client = client_of(embedder, limits=Limits(queue_tokens=100))
    begun, free = threading.Event(), threading.Event()
    measure = embedder.measure

    def held(*given):
        begun.set()
        assert free.wait(30)
        return measure(*given)

    monkeypatch.setattr(embedder, "measure", held)
    with ThreadPoolExecutor(1) as clients:
        first = clients.submit(client.post, "/v1/embeddings", json={**GOOD, "input": ["a text"] * 50})
        assert begun.wait(30)
        assert float(re.search(r"^st_reba_waiting_tokens (\S+)$", client.get("/metrics").text, re.MULTILINE)[1]) > 50
        monkeypatch.setattr(embedder, "measure", measure)
        refused = client.post("/v1/embeddings", json={**GOOD, "input": ["a text"] * 50})
        assert error(refused, 429)["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        free.set()
        assert first.result(30).status_code == 200
    assert client.post("/v1/embeddings", json=GOOD).status_code == 200


def test_what_cannot_be_a_server(model, reranker):
    with pytest.raises(ValueError, match="Two models are called m: give one of them another --name"):
        Server(Embedder("m", model), Reranker("m", reranker))
    for key in ("Schlüssel", "two\nlines", "a\0"):
        with pytest.raises(ValueError, match="An API key has other characters than printable ASCII"):
            Server(Embedder("m", model), keys=["good", key])
    with pytest.raises(ValueError, match="batch_tokens=0: give a whole number from 1"):
        Limits(batch_tokens=0)


def test_what_the_command_refuses(saved, reranker_path, backbone_path, monkeypatch):
    """Beside what it refuses at once: see tests/cli/test_refusals.py."""

    def said(*arguments):
        ends = CliRunner().invoke(app, ["serve", *arguments])
        assert ends.exit_code == 1, ends.output
        return " ".join(ends.output.split())

    assert "give it as --rerank" in said(reranker_path, "--port", "0")
    assert "st-reba build" in said(backbone_path(), "--port", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--host 127.0.0.1 --port {port} cannot be used" in said(saved, "--port", port)
    for missing in ("fastapi", "uvicorn", "prometheus_client"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, missing, None)
            assert f'Serving needs {missing}: pip install "st-reba[serve]".' in said(saved)
