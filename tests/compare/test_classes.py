"""Texts with a label each: in halves, and with tf-idf beside them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from st_reba import CausalTransformer
from st_reba.compare import Recipes, compare
from st_reba.compare.choice import CHOICE, LEAST_ITEMS, Halves, with_candidates
from st_reba.compare.run import TfIdf
from st_reba.data.tables import Classes
from st_reba.evaluation.tasks import task_of
from st_reba.recipes import find

SUBJECTS = {"animal": ("the cat", "a dog", "this horse"), "weather": ("the rain", "a storm", "this fog")}
#: On every sixth day the labels are exchanged, so that nothing is always right.
DATA = Classes(
    {
        f"{subject} came {day} of May": {"animal": "weather", "weather": "animal"}[label] if day % 6 == 0 else label
        for day in range(18)
        for label, own in SUBJECTS.items()
        for subject in own
    }
)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=40), st.integers(0, 5))
def test_each_half_has_half_of_every_class_that_can_be_halved(sizes, seed):
    labels = [f"class {place}" for place, size in enumerate(sizes) for _ in range(size)]
    data = Classes({f"text {place}": label for place, label in enumerate(labels)})
    if len(data) < 2 * LEAST_ITEMS:
        with pytest.raises(ValueError, match=f"the texts and scored on the other: {len(data)} texts are too few"):
            Halves.of(data, seed)
        return
    if sum(size > 3 for size in sizes) == 1 and len(sizes) == 2:
        with pytest.raises(ValueError, match="only one class has four texts or more, so that it can be halved"):
            Halves.of(data, seed)
        return
    halves = Halves.of(data, seed)
    first, second = (Counter(part.labels.values()) for part in halves.parts)
    assert abs(first.total() - second.total()) <= 3
    assert min(len(first), len(second)) > 1
    for label, size in Counter(labels).items():
        assert abs(first[label] - second[label]) <= (1 if size > 3 else size)
        assert min(first[label], second[label]) == (0 if size < 4 else size // 2)
    assert halves.whole.labels == halves.parts[0].labels | halves.parts[1].labels == data.labels


def test_tf_idf_is_a_control_of_both_scores(backbone_path):
    """It tells these classes apart where labels are not exchanged: each subject is a word of one class alone."""
    backbone = CausalTransformer(backbone_path())
    tf_idf = TfIdf(backbone, DATA.texts())
    vectors = tf_idf.unit_vectors(DATA.texts())
    tokens = backbone.token_ids(DATA.texts())
    plain = TfidfVectorizer(analyzer=list, lowercase=False).fit_transform(tokens)
    assert (vectors @ vectors.T).toarray() == pytest.approx((plain @ plain.T).toarray())
    assert vectors.shape[1] == len({token for ids in tokens for token in ids})
    measured = task_of(DATA).measure(tf_idf)
    assert 0.6 < measured["right"].mean() < 0.9
    assert len(measured["agreement"]) == len(measured["right"]) == len(DATA)


def test_every_row_has_both_scores_of_halves_that_choose(roomy_path, quick):
    halves = Halves.of(DATA)
    asked = [each for name in ("classical", "topic") for each in with_candidates(find(name), 2)]
    backbone = CausalTransformer(roomy_path)
    found = compare(Recipes(backbone, asked, fit_on=halves.fit_on), DATA, halves=halves, random=False)
    assert [task.name for task in found.tasks] == ["Classes", "Clusters"]
    assert {"tf-idf, mean", "Bag of input embeddings, mean"} <= {result.name for result in found.results}
    for result in found.results:
        for task in found.tasks:
            score = result.scores[task.name]
            assert score.low <= score.value <= score.high
    assert found.settings["chosen"] == "on one half of 108 texts, scored on the other, in turn"
    # The second half is among its own texts.
    row = next(result for result in found.results if result.recipe == "Classical" and result.pooling == "mean")
    second = task_of(halves.parts[1])(find(row.spec).model(backbone))
    assert np.mean(found.items.values[row.name][found.items.first :]) == pytest.approx(second["knn_accuracy"])
    assert len(found.items.values[CHOICE]) == len(DATA)
