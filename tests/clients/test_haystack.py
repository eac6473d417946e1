"""Haystack: the embedders of ``sentence-transformers-haystack``."""

from __future__ import annotations

import numpy as np
import pytest
from haystack import Document
from haystack.utils import ComponentDevice
from haystack_integrations.components.embedders.sentence_transformers import (
    SentenceTransformersDocumentEmbedder,
    SentenceTransformersTextEmbedder,
)

from ..backbones import TEXTS

QUERY = "Who chased the mouse?"


@pytest.fixture(scope="module")
def settings(prompted_path):
    return {"model": prompted_path, "device": ComponentDevice.from_str("cpu"), "progress_bar": False}


def test_documents_and_a_query(settings, own):
    embedder = SentenceTransformersDocumentEmbedder(**settings, encode_kwargs={"prompt_name": "document"})
    found = embedder.run(documents=[Document(content=text) for text in TEXTS])["documents"]
    vectors = np.float32([document.embedding for document in found])
    assert np.array_equal(vectors, own.encode_document(TEXTS))
    embedder = SentenceTransformersTextEmbedder(**settings, encode_kwargs={"prompt_name": "query"})
    assert np.array_equal(np.float32(embedder.run(text=QUERY)["embedding"]), own.encode_query(QUERY))


def test_without_the_import(check_without_the_import):
    check_without_the_import(
        "from haystack_integrations.components.embedders.sentence_transformers import SentenceTransformersTextEmbedder",
        "SentenceTransformersTextEmbedder(model=path).run(text='a')",
        "SentenceTransformersTextEmbedder(model=path, trust_remote_code=True).run(text='a')",
    )
