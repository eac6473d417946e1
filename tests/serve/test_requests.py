"""What is refused, in which words; and what operators see."""

from __future__ import annotations

import gzip
import json
import socket
import sys

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from st_reba.serve.app import Server, make_app
from st_reba.serve.models import Embedder, Reranker
from st_reba.serve.requests import Limits
from st_reba_cli import app

GOOD = {"model": "my-model", "input": "a"}
PAIRS = {"model": "my-reranker", "query": "a", "documents": ["a"]}


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
        ({"input": ""}, "input", "'input' is empty: give a text of at least one character."),
        ({"input": ["a", ""]}, "input", "'input'[1] is empty: give a text of at least one character."),
        ({"query": "", "documents": ["a"]}, "query", "'query' is empty: give a text of at least one character."),
        ({"input": []}, "input", "'input': give a text, or a list of texts"),
        ({"input": [[5], [100_257]]}, "input", "token ids are not read (LangChain: check_embedding_ctx_length=False)"),
        ({"input": ["a"] * 2049}, "input", "'input' has 2049 entries; the limit is 2048"),
        ({"dimensions": 0}, "dimensions", "'dimensions' is 0: give a number from 1 to 32."),
        ({"dimensions": 10**400}, "dimensions", "'dimensions' is 1000"),
        ({"documents": []}, "documents", "'documents': give a list of texts"),
        ({"documents": ["a", {"no": 1}]}, "documents", "'documents': give a list of texts, or of objects with a text"),
        ({"documents": ["a"] * 2049}, "documents", "'documents' has 2049 entries; the limit is 2048"),
        ({"encoding_format": "int8"}, "encoding_format", "'encoding_format': input should be 'float' or 'base64'"),
    ],
    ids=range(14),
)  # fmt: skip
def test_fields(client, given, param, said):
    path, good = ("/rerank", PAIRS) if "documents" in given else ("/v1/embeddings", GOOD)
    told = error(client.post(path, content=json.dumps({**good, **given})))
    assert said in told["message"]
    assert len(told["message"]) < 300
    assert told["type"] == "invalid_request_error"
    assert told["param"][:40] == param[:40]


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
    assert told["message"].startswith("The body is not a JSON object: ")
    assert len(told["message"]) < 300
    told = error(client.post("/v1/embeddings", json={"model": "my-model"}))
    assert (told["message"], told["param"]) == ("Missing required parameter: 'input'.", "input")


def test_a_body_in_another_coding(client):
    for path, given in (("/v1/embeddings", GOOD), ("/rerank", PAIRS)):
        body = json.dumps(given).encode()
        answer = client.post(path, content=gzip.compress(body), headers={"content-encoding": "gzip"})
        assert error(answer, 415)["message"] == "The body has the Content-Encoding gzip: send it uncompressed."
        assert client.post(path, content=body, headers={"content-encoding": "identity"}).status_code == 200


def test_a_body_that_is_too_large(model):
    server = Server(Embedder("m", model), limits=Limits(body_bytes=1000))
    with TestClient(make_app(server)) as client:
        for size in (1001, 5000, 50_000):
            body = json.dumps({"model": "m", "input": "a" * size})
            assert "than the limit of 1,000 bytes" in error(client.post("/v1/embeddings", content=body), 413)["message"]
        # Not told in advance.
        chunks = iter([b"a" * 400] * 10)
        assert "larger than" in error(client.post("/v1/embeddings", content=chunks), 413)["message"]


def test_models_and_paths_that_are_not_there(client, model, reranker):
    with pytest.raises(ValueError, match="Both models have the name m: give another --model-name"):
        Server(Embedder("m", model), Reranker("m", reranker))
    told = error(client.post("/v1/embeddings", json={**GOOD, "model": "gpt"}), 404)
    assert told["code"] == "model_not_found"
    assert told["message"] == (
        'There is no model "gpt" here that embeds texts: give "my-model", "my-model:query", "my-model:document".'
    )
    told = error(client.post("/rerank", json={**PAIRS, "model": "my-model"}), 404)
    assert told["message"] == 'There is no model "my-model" here that reranks texts: give "my-reranker".'
    assert "there is no such path" in error(client.get("/no"), 404)["message"]
    assert "the path has another method" in error(client.get("/v1/embeddings"), 405)["message"]
    data = client.get("/v1/models").json()["data"]
    assert [row["id"] for row in data] == ["my-model", "my-model:query", "my-model:document", "my-reranker"]


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


def test_metrics(client_of, model, token_ids, monkeypatch):
    client = client_of(Embedder("my-model", model))
    client.post("/v1/embeddings", json={**GOOD, "input": ["aa", "a"]})
    client.post("/v1/embeddings", json={**GOOD, "input": []})
    client.get("/no/such/path")
    monkeypatch.setattr("st_reba.serve.app._embeddings_answer", lambda *given: 1 / 0)
    assert "The server failed. See its log." in error(client.post("/v1/embeddings", json=GOOD), 500)["message"]
    lines = client.get("/metrics").text.splitlines()
    for line in (
        'st_reba_requests_total{path="/v1/embeddings",status="200"} 1.0',
        'st_reba_requests_total{path="/v1/embeddings",status="400"} 1.0',
        'st_reba_requests_total{path="other",status="404"} 1.0',
        'st_reba_requests_total{path="/v1/embeddings",status="500"} 1.0',
        'st_reba_request_seconds_count{path="/v1/embeddings"} 3.0',
        f"st_reba_tokens_total {len(token_ids('aa')) + 2}.0",
        "st_reba_batch_texts_sum 3.0",
    ):
        assert line in lines


def test_a_full_queue(model):
    """One request is taken whatever its size, and nothing beside it."""
    server = Server(Embedder("my-model", model), limits=Limits(queue_tokens=10))
    with TestClient(make_app(server)) as client:
        with server.batches.reserved(100):
            assert "st_reba_waiting_tokens 100.0" in client.get("/metrics").text.splitlines()
            refused = client.post("/v1/embeddings", json=GOOD)
            assert error(refused, 429)["code"] == "rate_limit_exceeded"
            assert refused.headers["retry-after"] == "1"
        assert client.post("/v1/embeddings", json=GOOD).status_code == 200


def test_what_the_command_refuses(saved, reranker_path, backbone_path, monkeypatch):
    """Beside what it refuses at once: see tests/cli/test_refusals.py."""

    def said(*arguments):
        ends = CliRunner().invoke(app, ["serve", *arguments])
        assert ends.exit_code == 1, ends.output
        return " ".join(ends.output.split())

    assert "Give it as --rerank" in said(reranker_path, "--port", "0")
    assert "st-reba build" in said(backbone_path(), "--port", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--host 127.0.0.1 --port {port} cannot be used" in said(saved, "--port", port)
    for missing in ("fastapi", "uvicorn", "prometheus_client"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, missing, None)
            assert f'Serving needs {missing}: pip install "st-reba[serve]".' in said(saved)
