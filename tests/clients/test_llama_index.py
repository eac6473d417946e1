"""LlamaIndex: ``llama_index.embeddings.huggingface.HuggingFaceEmbedding``."""

from __future__ import annotations

import numpy as np
import pytest
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from ..backbones import TEXTS
from ..conftest import PROMPTS

QUERY = "Who chased the mouse?"


@pytest.fixture(scope="module")
def client(prompted_path):
    return HuggingFaceEmbedding(
        model_name=prompted_path,
        device="cpu",
        query_instruction=PROMPTS["query"],
        text_instruction=PROMPTS["document"],
        normalize=False,
    )


def test_documents(client, own):
    assert np.array_equal(np.float32(client.get_text_embedding_batch(TEXTS)), own.encode_document(TEXTS))


def test_a_query(client, own):
    assert np.array_equal(np.float32(client.get_query_embedding(QUERY)), own.encode_query(QUERY))


def test_normalized_is_the_default(prompted_path, own):
    client = HuggingFaceEmbedding(model_name=prompted_path, device="cpu", text_instruction=PROMPTS["document"])
    vectors = np.float32(client.get_text_embedding_batch(TEXTS))
    assert np.array_equal(vectors, own.encode_document(TEXTS, normalize_embeddings=True))


def test_saved_prompts_give_way_to_its_own_empty_ones(prompted_path, own):
    client = HuggingFaceEmbedding(model_name=prompted_path, device="cpu", normalize=False)
    assert np.array_equal(np.float32(client.get_query_embedding(QUERY)), own.encode(QUERY))


def test_without_the_import(check_without_the_import):
    check_without_the_import(
        "from llama_index.embeddings.huggingface import HuggingFaceEmbedding",
        "HuggingFaceEmbedding(model_name=path)",
        "HuggingFaceEmbedding(model_name=path, trust_remote_code=True)",
    )
