"""BERTopic, with scikit-learn in place of UMAP and HDBSCAN, as its documentation offers."""

from __future__ import annotations

import numpy as np
import pytest
from bertopic import BERTopic
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

TEXTS = [
    f"{animal} chased the {other}" for animal in ("the dog", "a cat", "my horse") for other in ("mouse", "bird", "fox")
] + [f"{amount} in the {place}" for amount in ("money", "gold", "a loan") for place in ("bank", "market", "budget")]


class Reduction(PCA):
    """Remembers the embeddings that it was given."""

    def fit_transform(self, X, y=None):  # noqa: N803 (scikit-learn's name)
        self.given_ = X
        return super().fit_transform(X, y)


def reduction() -> Reduction:
    return Reduction(n_components=2, random_state=0)


def clustering() -> KMeans:
    return KMeans(n_clusters=2, n_init=3, random_state=0)


@pytest.mark.parametrize("by_path", [False, True])
def test_topics(by_path, own, prompted_path):
    topics = BERTopic(
        embedding_model=prompted_path if by_path else own, umap_model=reduction(), hdbscan_model=clustering()
    )
    found, _ = topics.fit_transform(TEXTS)
    assert np.array_equal(topics.umap_model.given_, own.encode(TEXTS))
    expected = clustering().fit_predict(reduction().fit_transform(own.encode(TEXTS)))
    # Topics are numbered by size, clusters as they come.
    assert len(set(found)) == len(set(zip(found, expected, strict=True))) == 2
    # A text's topic is found again from its embedding.
    assert list(topics.transform(TEXTS[:3])[0]) == found[:3]


def test_without_the_import(check_without_the_import):
    """BERTopic has no such flag: give it a loaded model."""
    fit = "BERTopic(embedding_model={}, umap_model=PCA(2), hdbscan_model=KMeans(2)).fit(texts)"
    check_without_the_import(
        "from bertopic import BERTopic\n"
        "from sentence_transformers import SentenceTransformer\n"
        "from sklearn.cluster import KMeans\n"
        "from sklearn.decomposition import PCA\n"
        f"texts = {TEXTS!r}",
        fit.format("path"),
        fit.format("SentenceTransformer(path, trust_remote_code=True)"),
    )
