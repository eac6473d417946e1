"""Tiny models, served."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import uvicorn
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from starlette.testclient import TestClient

from st_reba import ReBAModule
from st_reba.serve.app import Server, bind, make_app, url_of
from st_reba.serve.models import Embedder, Reranker

from ..conftest import PROMPTS


@contextlib.contextmanager
def serving(server: Server) -> Iterator[str]:
    """Run a server in a thread within the block, and return its URL."""
    with bind("127.0.0.1", 0) as listening:
        running = uvicorn.Server(uvicorn.Config(make_app(server), log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        while not running.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield url_of(listening)
        finally:
            running.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def model(shallow_path):
    """The same alone and in a batch, to the bit: what a server answers can be compared so, whatever its batches."""
    head = ReBAModule(shallow_path, repetitions=2, deterministic=True)
    pooling = Pooling(head.get_embedding_dimension(), "mean")
    return SentenceTransformer(modules=[head, pooling, Normalize()], prompts=PROMPTS, device="cpu")


@pytest.fixture(scope="session")
def saved(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "my-model"
    model.save_pretrained(str(directory), create_model_card=False)
    return str(directory)


@pytest.fixture(scope="session")
def reranker_path(encoder_paths, tmp_path_factory):
    """A CrossEncoder with random weights, saved."""
    directory = str(tmp_path_factory.mktemp("models") / "my-reranker")
    torch.manual_seed(0)
    model = CrossEncoder(encoder_paths()[0], num_labels=1, device="cpu")
    model.model.classifier.weight.data.normal_(std=5)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def reranker(reranker_path):
    return CrossEncoder(reranker_path, device="cpu")


@pytest.fixture
def client_of():
    """``client_of(embedder, reranker, limits, keys)``: a client of a server in this process."""
    opened = []

    def made(*args, **kwargs):
        client = TestClient(make_app(Server(*args, **kwargs)), raise_server_exceptions=False)
        client.__enter__()
        opened.append(client)
        return client

    yield made
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture(scope="module")
def client(model, reranker):
    server = Server(Embedder("my-model", model), Reranker("my-reranker", reranker))
    with TestClient(make_app(server), raise_server_exceptions=False) as client:
        yield client
