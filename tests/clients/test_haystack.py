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
from ..conftest import PROMPTS

QUERY = "Who chased the mouse?"


@pytest.fixture(scope="module")
def settings(prompted_path):
    return {"model": prompted_path, "device": ComponentDevice.from_str("cpu"), "progress_bar": False}


def test_documents(settings, own):
    embedder = SentenceTransformersDocumentEmbedder(**settings, encode_kwargs={"prompt_name": "document"})
    found = embedder.run(documents=[Document(content=text) for text in TEXTS])["documents"]
    vectors = np.float32([document.embedding for document in found])
    assert np.array_equal(vectors, own.encode_document(TEXTS))


def test_a_query(settings, own):
    embedder = SentenceTransformersTextEmbedder(**settings, encode_kwargs={"prompt_name": "query"})
    assert np.array_equal(np.float32(embedder.run(text=QUERY)["embedding"]), own.encode_query(QUERY))


def test_a_prefix_is_part_of_the_text(settings, own):
    """Haystack joins it to the text, so it is repeated and pooled with it: a prompt goes into ``encode_kwargs``."""
    embedder = SentenceTransformersTextEmbedder(**settings, prefix=PROMPTS["query"])
    vector = np.float32(embedder.run(text=QUERY)["embedding"])
    assert np.array_equal(vector, own.encode(PROMPTS["query"] + QUERY))
    assert not np.allclose(vector, own.encode_query(QUERY), atol=1e-2)


def test_without_the_import(check_without_the_import):
    check_without_the_import(
        "from haystack_integrations.components.embedders.sentence_transformers import SentenceTransformersTextEmbedder",
        "SentenceTransformersTextEmbedder(model=path).run(text='a')",
        "SentenceTransformersTextEmbedder(model=path, trust_remote_code=True).run(text='a')",
    )
