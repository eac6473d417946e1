from __future__ import annotations

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from st_reba import CausalTransformer
from st_reba.compare.tf_idf import TfIdf
from st_reba.data.demo import DEMO_PAIRS
from st_reba.data.tables import read_pairs

from ..backbones import TEXTS


@pytest.fixture(scope="module")
def backbone(backbone_path):
    return CausalTransformer(backbone_path())


def test_what_scikit_learn_gives(backbone):
    """With tokens, too, that no text had which idf was counted on."""
    pairs = read_pairs(DEMO_PAIRS)
    for counted in (pairs.texts(), pairs.texts()[:40]):
        vectorizer = TfidfVectorizer(analyzer=lambda text: backbone.token_ids([text])[0])
        # Each token of the vocabulary once more, in no text: idf counts only the others.
        vectorizer.vocabulary = range(backbone.model.get_input_embeddings().num_embeddings)
        vectorizer.fit(counted)
        first, second = (vectorizer.transform(side).toarray() for side in (pairs.first, pairs.second))
        found = TfIdf(backbone, counted).cosines(pairs.first, pairs.second)
        assert np.allclose(found, (first * second).sum(axis=1))


def test_a_text_without_tokens_is_like_nothing(backbone):
    tf_idf = TfIdf(backbone, ["", *TEXTS])
    assert tf_idf.cosines(["", "", TEXTS[0]], ["", TEXTS[0], TEXTS[0]]) == pytest.approx([0, 0, 1])


def test_the_nearest_are_those_of_the_highest_cosine(backbone):
    tf_idf = TfIdf(backbone, TEXTS)
    documents = [*TEXTS, TEXTS[1]]
    for query, found in zip(TEXTS, tf_idf.nearest(TEXTS, documents, 4), strict=True):
        cosines = tf_idf.cosines([query] * len(documents), documents)
        order = sorted(range(len(documents)), key=lambda index: (-cosines[index], index))
        assert [index for index, _ in found] == order[:4]
        assert [score for _, score in found] == pytest.approx(cosines[order[:4]])


def test_texts_of_the_same_tokens_are_equals(backbone):
    """Whatever rounding makes of them: a rank correlation would else order them by chance."""
    pairs = read_pairs(DEMO_PAIRS)
    tf_idf = TfIdf(backbone, pairs.texts())
    assert set(tf_idf.cosines(pairs.first, pairs.first)) == {1.0}
    assert tf_idf.nearest(pairs.first[:1], pairs.first[:1] * 3, 3) == [[(0, 1.0), (1, 1.0), (2, 1.0)]]
