"""BERTopic, with scikit-learn in place of UMAP and HDBSCAN, as its documentation offers."""

from __future__ import annotations

import numpy as np
import pytest
from bertopic import BERTopic
from bertopic.backend import SentenceTransformerBackend
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

TEXTS = [
    f"{animal} chased the {other}" for animal in ("the dog", "a cat", "my horse") for other in ("mouse", "bird", "fox")
] + [f"{amount} in the {place}" for amount in ("money", "gold", "a loan") for place in ("bank", "market", "budget")]


def reduction() -> PCA:
    return PCA(n_components=2, random_state=0)


def clustering() -> KMeans:
    return KMeans(n_clusters=2, n_init=3, random_state=0)


@pytest.mark.parametrize("by_path", [False, True])
def test_topics(by_path, own, prompted_path):
    embedding_model = prompted_path if by_path else own
    topics = BERTopic(embedding_model=embedding_model, umap_model=reduction(), hdbscan_model=clustering())
    found, _ = topics.fit_transform(TEXTS)
    expected = clustering().fit_predict(reduction().fit_transform(own.encode(TEXTS)))
    # Topics are numbered by size.
    assert len(set(found)) == 2
    assert len(set(zip(found, expected, strict=True))) == 2
    # A text's topic is found again from its embedding.
    assert topics.transform(TEXTS[:3])[0].tolist() == found[:3]


def test_embeddings(own, prompted_path):
    assert np.array_equal(SentenceTransformerBackend(own).embed(TEXTS), own.encode(TEXTS))
    assert np.array_equal(SentenceTransformerBackend(prompted_path).embed(TEXTS), own.encode(TEXTS))


def test_without_the_import(check_without_the_import):
    """BERTopic has no such flag: give it a loaded model."""
    check_without_the_import(
        "from bertopic.backend import SentenceTransformerBackend\n"
        "from sentence_transformers import SentenceTransformer",
        "SentenceTransformerBackend(path)",
        "SentenceTransformerBackend(SentenceTransformer(path, trust_remote_code=True))",
    )
