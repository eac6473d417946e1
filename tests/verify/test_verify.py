"""Servers with faults: each is served by a model that has the fault, and named by what is looked for."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from sentence_transformers.sentence_transformer.modules import Normalize

from st_reba import CausalTransformer
from st_reba.modules.endpoint import EndpointError
from st_reba.verify import Endpoint, verify

from ..cli import typed
from ..conftest import PROMPTS, change, pipeline
from ..endpoint.server import Server


@pytest.fixture
def serve():
    """``serve(embed)``: the URL of a server that embeds by a function."""
    opened = []

    def start(embed):
        opened.append(Server(embed))
        return opened[-1].url

    yield start
    for server in opened:
        server.close()


@pytest.fixture(scope="module")
def models(shallow_path):
    head = CausalTransformer(shallow_path, pool_over="all")

    made = partial(pipeline, head, prompts=PROMPTS)
    asks = {"default_prompt_name": "query"}
    return {
        "last": made("lasttoken", Normalize()),
        "last, query": made("lasttoken", Normalize(), **asks),
        "last, document": made("lasttoken", Normalize(), default_prompt_name="document"),
        "mean, query": made("mean", Normalize(), **asks),
        "bare": made("lasttoken"),
    }


UNLIKE = "neither another pooling nor a missing prompt explains it: another model, recipe or precision?"


FAULTS = [
    ("last, query", "last, query", []),
    ("last", "last, query", ["the prompt is missing"]),
    ("last, document", "last, query", ['the prompt is that of "document"']),
    ("mean, query", "last, query", ["pooling is the mean of all tokens, and the model's lasttoken"]),
    ("last", "mean, query", ["the prompt is missing, and pooling is the last token, and the model's mean"]),
    ("bare", "last", ["normalization: its vectors have lengths of "]),
    ("last", "bare", ["normalization: its vectors have lengths of 1 to 1, and the model's of "]),
    (lambda texts: np.eye(32)[[len(text) % 5 for text in texts]], "last", [UNLIKE]),
    (lambda texts: np.eye(32)[[0] * len(texts), :8], "last", ["it has 8 values, the model's 32"]),
]


@pytest.mark.parametrize(("served", "own", "expected"), FAULTS)
def test_a_fault_is_named(served, own, expected, serve, models):
    embed = models[served].encode if isinstance(served, str) else served
    seen = verify(Endpoint(serve(embed)), models[own])
    assert (seen.equal, len(seen.causes)) == (not expected, len(expected))
    assert all(cause.startswith(said) for cause, said in zip(seen.causes, expected, strict=True)), seen
    assert seen.equal == (seen.distance <= seen.tolerance) or "normalization" in seen.causes[0]


def test_prompts_and_tolerances(serve, models):
    own = models["last, query"]
    document = Endpoint(serve(models["last, document"].encode))
    assert verify(document, own, prompt_name="document").equal
    with pytest.raises(ValueError, match='the model has "query", "document"'):
        verify(document, own, prompt_name="no")
    with pytest.raises(ValueError, match="The API key has other characters than printable ASCII"):
        Endpoint(document.url, key="密钥")
    with pytest.raises(EndpointError, match="answered 404"):
        verify(Endpoint(f"{document.url}/nowhere"), own)


def test_the_command(serve, models, tmp_path, monkeypatch):
    model = models["last, query"]
    path = str(tmp_path / "model")
    model.save_pretrained(path, create_model_card=False)
    line = f"--model {path} --dtype float32 --device cpu"
    # A proxy that is not there, which this machine's own addresses do not need.
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    url = serve(model.encode)
    assert f"Equal: {url}/v1/embeddings returns the vectors of {path}." in typed(f"verify {url} {line}")
    fault = serve(models["last"].encode)
    assert "- the prompt is missing" in typed(f"verify {fault} {line}", expect=1)
    # One that is there, for a machine that is not.
    monkeypatch.setenv("http_proxy", url)
    told = typed(f"verify http://elsewhere.example {line} --model-name mine --json")
    found = json.loads(told[told.index("{") :])
    assert (found["schema"], found["equal"]) == ("st-reba/verify/1", True)
    change(tmp_path / "model" / "config_sentence_transformers.json", model_type="SparseEncoder")
    told = typed(f"verify {url} {line}", expect=1)
    assert "is a SparseEncoder: give a SentenceTransformer" in told
    assert "begins with http:// or https://" in typed(f"verify localhost --model {path}", expect=1)
