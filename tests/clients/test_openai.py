"""OpenAI's client, and LangChain's and LlamaIndex's that are made of it, with a server in this process."""

from __future__ import annotations

import threading
import time

import numpy as np
import openai
import pytest
import uvicorn
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai import OpenAIEmbedding

from st_reba.serve.app import Server, bound, make_app, url_of
from st_reba.serve.batches import Limits
from st_reba.serve.models import Embedder

from ..backbones import TEXTS


@pytest.fixture(scope="module")
def url(own):
    server = Server(Embedder("my-model", own), limits=Limits(inputs=100), keys=["secret"])
    with bound("127.0.0.1", 0) as listening:
        running = uvicorn.Server(uvicorn.Config(make_app(server), log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        while not running.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"{url_of(listening)}/v1"
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="secret", max_retries=0)


def close(found, expected):
    np.testing.assert_allclose(np.float32(found), expected, rtol=0, atol=2e-6 * np.linalg.norm(expected))


def test_openai(client, own):
    for given in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="my-model", input=TEXTS, **given)
        close([row.embedding for row in answer.data], own.encode(TEXTS))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    assert client.embeddings.create(model="my-model", input=TEXTS[0], dimensions=5).data[0].index == 0
    queries = client.embeddings.create(model="my-model:query", input=TEXTS)
    close([row.embedding for row in queries.data], own.encode_query(TEXTS))
    assert [model.id for model in client.models.list()] == ["my-model", "my-model:query", "my-model:document"]


def test_openais_errors(client, url):
    with pytest.raises(openai.BadRequestError, match="'input': give a text, or a list of texts") as refused:
        client.embeddings.create(model="my-model", input=[[1, 2]])
    assert refused.value.param == "input"
    with pytest.raises(openai.NotFoundError, match='There is no model "gpt"'):
        client.embeddings.create(model="gpt", input="a")
    with pytest.raises(openai.AuthenticationError, match="asks for an API key"):
        openai.OpenAI(base_url=url, api_key="no").embeddings.create(model="my-model", input="a")


def test_langchain(url, own):
    client = OpenAIEmbeddings(
        model="my-model", base_url=url, api_key="secret", check_embedding_ctx_length=False, chunk_size=2
    )
    close(client.embed_documents(TEXTS), own.encode(TEXTS))
    close(client.embed_query(TEXTS[0]), own.encode(TEXTS[0]))


def test_llama_index(url, own):
    settings = {"api_base": url, "api_key": "secret"}
    client = OpenAIEmbedding(model_name="my-model:document", **settings)
    close(client.get_text_embedding_batch(TEXTS), own.encode_document(TEXTS))
    client = OpenAIEmbedding(model_name="my-model:query", **settings)
    close(client.get_query_embedding(TEXTS[0]), own.encode_query(TEXTS[0]))
