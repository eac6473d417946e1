"""LlamaIndex: ``llama_index.embeddings.huggingface.HuggingFaceEmbedding``."""

from __future__ import annotations

import numpy as np
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from ..backbones import TEXTS
from ..conftest import PROMPTS

QUERY = "Who chased the mouse?"


def test_documents_and_a_query(prompted_path, own):
    """Vectors have length 1 by default; saved prompts give way to its own empty ones."""
    settings = {"model_name": prompted_path, "device": "cpu"}
    client = HuggingFaceEmbedding(**settings, query_instruction=PROMPTS["query"], normalize=False)
    assert np.array_equal(np.float32(client.get_query_embedding(QUERY)), own.encode_query(QUERY))
    assert np.array_equal(np.float32(client.get_text_embedding_batch(TEXTS)), own.encode(TEXTS))
    client = HuggingFaceEmbedding(**settings, text_instruction=PROMPTS["document"])
    vectors = np.float32(client.get_text_embedding_batch(TEXTS))
    assert np.array_equal(vectors, own.encode_document(TEXTS, normalize_embeddings=True))


def test_without_the_import(check_without_the_import):
    check_without_the_import(
        "from llama_index.embeddings.huggingface import HuggingFaceEmbedding",
        "HuggingFaceEmbedding(model_name=path)",
        "HuggingFaceEmbedding(model_name=path, trust_remote_code=True)",
    )
