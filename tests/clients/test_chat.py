"""Programs that chat and embed at one address: OpenAI's client, LangChain's and mem0's that are made of it."""

from __future__ import annotations

import os

os.environ["MEM0_TELEMETRY"] = "False"

import numpy as np
import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from mem0 import Memory
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from st_reba import EchoModule
from st_reba.serve.app import Server
from st_reba.serve.chat import Chat
from st_reba.serve.models import Embedder

from ..backbones import TEXTS, save_talking
from ..serve.conftest import serving

QUESTION = [{"role": "user", "content": "Who chased the mouse?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # mem0 asks in thousands of tokens.
    module = EchoModule(save_talking(tmp_path_factory.mktemp("lm"), max_position_embeddings=32768), max_seq_length=200)
    pooling = Pooling(module.get_embedding_dimension(), "mean")
    return SentenceTransformer(modules=[module, pooling, Normalize()], device="cpu")


@pytest.fixture(scope="module")
def url(model):
    embedder = Embedder("my-model", model)
    with serving(Server(embedder, chat=Chat(embedder))) as address:
        yield f"{address}/v1"


def test_openai(url):
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked = {"model": "my-model", "messages": QUESTION, "temperature": 0, "max_tokens": 20}
    answer = client.chat.completions.create(**asked)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (20, "length")
    parts = [part.choices[0].delta.content or "" for part in client.chat.completions.create(**asked, stream=True)]
    # A stream ends before bytes that are no character.
    assert "".join(parts)
    assert answer.choices[0].message.content.startswith("".join(parts))
    assert client.completions.create(model="my-model", prompt="A dog", max_tokens=3).usage.completion_tokens == 3
    with pytest.raises(openai.NotFoundError, match='There is no model "gpt" here that chats'):
        client.chat.completions.create(model="gpt", messages=QUESTION)


def test_langchain(url, model):
    where = {"model": "my-model", "base_url": url, "api_key": "none"}
    chat = ChatOpenAI(**where, temperature=0, max_tokens=20)
    answer = chat.invoke("Who chased the mouse?")
    assert answer.usage_metadata["output_tokens"] == 20
    assert answer.content.startswith("".join(part.content for part in chat.stream("Who chased the mouse?")))
    embeddings = OpenAIEmbeddings(**where, check_embedding_ctx_length=False)
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), model.encode(TEXTS), atol=1e-6)


def test_mem0(url, model, tmp_path):
    """The tests' model extracts no facts: what it answers is no JSON, and nothing is kept of that."""
    where, width = {"model": "my-model", "openai_base_url": url, "api_key": "none"}, model.get_embedding_dimension()
    store = {"path": str(tmp_path / "qdrant"), "embedding_model_dims": width, "on_disk": True}
    memory = Memory.from_config(
        {
            "llm": {"provider": "openai", "config": {**where, "temperature": 0, "max_tokens": 20}},
            "embedder": {"provider": "openai", "config": where},
            "vector_store": {"provider": "qdrant", "config": store},
            "history_db_path": str(tmp_path / "history.db"),
        }
    )
    for text in TEXTS[:3]:
        memory.add(text, user_id="ann", infer=False)
    found = memory.search("Who chased the mouse?", filters={"user_id": "ann"}, top_k=1)["results"]
    nearest = model.similarity(model.encode(["Who chased the mouse?"]), model.encode(TEXTS[:3])).argmax()
    assert [row["memory"] for row in found] == [TEXTS[int(nearest)]]
    assert memory.add("My sister plays the cello.", user_id="ann")["results"] == []
