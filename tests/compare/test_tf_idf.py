from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from st_reba import CausalTransformer
from st_reba.compare.run import TfIdf
from st_reba.data.demo import demo_pairs
from st_reba.data.tables import read_pairs

from ..backbones import TEXTS


@pytest.fixture(scope="module")
def backbone(backbone_path):
    return CausalTransformer(backbone_path())


@given(
    st.lists(st.text("ab d猫"), min_size=1, max_size=6), st.text("abcd猫", min_size=1), st.text("abcd猫", min_size=1)
)
def test_naively(backbone, fit_texts, first, second):
    """With tokens, too, that no text had which idf was counted on."""
    counted = [set(ids) for ids in backbone.token_ids(fit_texts) if ids]

    def weighed(text):
        tf = Counter(backbone.token_ids([text])[0])
        df = {token: sum(token in text for text in counted) for token in tf}
        return {token: count * (math.log((1 + len(counted)) / (1 + df[token])) + 1) for token, count in tf.items()}

    one, other = weighed(first), weighed(second)
    product = sum(value * other.get(token, 0) for token, value in one.items())
    expected = product / math.hypot(*one.values()) / math.hypot(*other.values())
    assert TfIdf(backbone, fit_texts).cosines([first], [second])[0] == pytest.approx(expected, abs=1e-12)


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
    pairs = read_pairs(demo_pairs("en"))
    tf_idf = TfIdf(backbone, pairs.texts())
    assert set(tf_idf.cosines(pairs.first, pairs.first)) == {1.0}
    assert tf_idf.nearest(pairs.first[:1], pairs.first[:1] * 3, 3) == [[(0, 1.0), (1, 1.0), (2, 1.0)]]
