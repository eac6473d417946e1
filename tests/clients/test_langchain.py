"""LangChain: ``langchain_huggingface.HuggingFaceEmbeddings``."""

from __future__ import annotations

import numpy as np
import pytest
from langchain_huggingface import HuggingFaceEmbeddings

from ..backbones import TEXTS

QUERY = "Who chased the mouse?"


@pytest.fixture(scope="module")
def client(prompted_path):
    return HuggingFaceEmbeddings(
        model_name=prompted_path,
        model_kwargs={"device": "cpu"},
        encode_kwargs={"prompt_name": "document"},
        query_encode_kwargs={"prompt_name": "query"},
    )


def test_documents(client, own):
    assert np.array_equal(np.float32(client.embed_documents(TEXTS)), own.encode_document(TEXTS))


def test_a_query(client, own):
    assert np.array_equal(np.float32(client.embed_query(QUERY)), own.encode_query(QUERY))


def test_without_names_there_are_no_prompts(prompted_path, own):
    client = HuggingFaceEmbeddings(model_name=prompted_path, model_kwargs={"device": "cpu"})
    assert np.array_equal(np.float32(client.embed_documents(TEXTS)), own.encode(TEXTS))
    assert np.array_equal(np.float32(client.embed_query(QUERY)), own.encode(QUERY))


def test_without_the_import(check_without_the_import):
    check_without_the_import(
        "from langchain_huggingface import HuggingFaceEmbeddings",
        "HuggingFaceEmbeddings(model_name=path)",
        "HuggingFaceEmbeddings(model_name=path, model_kwargs=dict(trust_remote_code=True))",
    )
