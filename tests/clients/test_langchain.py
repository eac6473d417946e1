"""LangChain: ``langchain_huggingface.HuggingFaceEmbeddings``."""

from __future__ import annotations

import numpy as np
from langchain_huggingface import HuggingFaceEmbeddings

from ..backbones import TEXTS

QUERY = "Who chased the mouse?"


def test_documents_and_a_query(prompted_path, own):
    """Without names there are no prompts."""
    settings = {"model_name": prompted_path, "model_kwargs": {"device": "cpu"}}
    client = HuggingFaceEmbeddings(
        **settings, encode_kwargs={"prompt_name": "document"}, query_encode_kwargs={"prompt_name": "query"}
    )
    assert np.array_equal(np.float32(client.embed_documents(TEXTS)), own.encode_document(TEXTS))
    assert np.array_equal(np.float32(client.embed_query(QUERY)), own.encode_query(QUERY))
    assert np.array_equal(np.float32(HuggingFaceEmbeddings(**settings).embed_query(QUERY)), own.encode(QUERY))


def test_without_the_import(check_without_the_import):
    check_without_the_import(
        "from langchain_huggingface import HuggingFaceEmbeddings",
        "HuggingFaceEmbeddings(model_name=path)",
        "HuggingFaceEmbeddings(model_name=path, model_kwargs=dict(trust_remote_code=True))",
    )
