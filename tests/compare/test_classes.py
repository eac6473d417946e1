"""Texts with a label each: compared, chosen on halves, saved, and held against others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from st_reba import CausalTransformer
from st_reba.compare import Recipes, compare
from st_reba.compare.against import side_by_side
from st_reba.compare.choice import CHOICE, LEAST_ITEMS, Halves, with_candidates
from st_reba.compare.report import write_report
from st_reba.compare.results import Comparison
from st_reba.compare.tf_idf import TfIdf
from st_reba.data.tables import Classes
from st_reba.evaluation import bootstrap
from st_reba.evaluation.tasks import task_of
from st_reba.recipes import find

pytestmark = pytest.mark.usefixtures("quick")

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


@pytest.fixture(scope="module")
def backbone(roomy_path):
    return CausalTransformer(roomy_path).eval()


@pytest.fixture(scope="module")
def halves():
    return Halves.of(DATA)


@pytest.fixture(scope="module")
def found(backbone, halves, quick):
    asked = [each for name in ("classical", "topic") for each in with_candidates(find(name), 2)]
    return compare(Recipes(backbone, asked, fit_on=halves.fit_on), DATA, halves=halves)


# The halves


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
    assert first.total() + second.total() == len(data)
    assert abs(first.total() - second.total()) <= 3
    assert min(len(first), len(second)) > 1
    for label, size in Counter(labels).items():
        assert abs(first[label] - second[label]) <= (1 if size > 3 else size)
        assert min(first[label], second[label]) == (0 if size < 4 else size // 2)
    assert list(halves.whole.labels) == [*halves.parts[0].labels, *halves.parts[1].labels]
    assert halves.whole.labels == halves.parts[0].labels | halves.parts[1].labels == data.labels


# A comparison


def test_tf_idf_is_a_control_of_both_scores(backbone):
    """It tells these classes apart where labels are not exchanged: each subject is a word of one class alone."""
    tf_idf = TfIdf(backbone, DATA.texts())
    vectors = tf_idf.unit_vectors(DATA.texts())
    tokens = backbone.token_ids(DATA.texts())
    plain = TfidfVectorizer(analyzer=list, lowercase=False).fit_transform(tokens)
    assert (vectors @ vectors.T).toarray() == pytest.approx((plain @ plain.T).toarray())
    assert vectors.shape[1] == len({token for ids in tokens for token in ids})
    measured = task_of(DATA).measure(tf_idf)
    assert 0.6 < measured["right"].mean() < 0.9
    assert len(measured["agreement"]) == len(measured["right"]) == len(DATA)


def test_every_row_has_both_scores_and_their_intervals(found):
    assert [(task.name, task.metric) for task in found.tasks] == [
        ("Classes", "5-NN accuracy x 100"), ("Clusters", "V-measure x 100")
    ]  # fmt: skip
    assert found.tasks[0].chance == 0.5
    names = {result.name for result in found.results}
    assert {"tf-idf, mean", "Bag of input embeddings, mean", "Random weights, Bag of input embeddings, mean"} <= names
    for result in found.results:
        for task in found.tasks:
            score = result.scores[task.name]
            assert score.low <= score.value <= score.high
    assert found.answer
    assert found.settings["chosen"] == "on one half of 108 texts, scored on the other, in turn"
    names = ("tf-idf, mean", "Classical, mean")
    first, second = (np.array(found.items.values[name]) for name in names)
    draws = np.random.default_rng(1).integers(108, size=(4000, 108))
    expected = np.quantile((first - second)[draws].mean(axis=1), [0.025, 0.975])
    assert expected[0] < expected[1]
    assert bootstrap.difference(found.items.items(), *names) == pytest.approx(expected, abs=0.02)


def test_a_row_is_scored_half_by_half_as_a_model_that_is_built(found, backbone, halves):
    """The second half by what the first chose, with filters of the first half's texts, among the second's own texts."""
    row = next(result for result in found.results if result.recipe.startswith("Topic"))
    own = next(each for each in with_candidates(find("topic"), 2) if each.key == row.spec and each.shares == row.shares
               and ("" if each.wording is None else each.wording.template) == row.template)  # fmt: skip
    first, second = halves.parts
    model = replace(own, fit_texts=tuple(first.texts())).model(backbone)
    scores = task_of(second)(model)
    assert found.items.first == len(first)
    assert np.mean(found.items.values[row.name][len(first) :]) == pytest.approx(scores["knn_accuracy"])
    assert len(found.items.values[CHOICE]) == len(DATA)


def test_what_was_found_is_saved_shown_and_held_against_another(found, tmp_path):
    found.save(tmp_path / "comparison.json")
    loaded = Comparison.load(tmp_path / "comparison.json")
    assert loaded.tasks == found.tasks
    assert loaded.items.kind == "mean"
    assert "both comparisons are of the same labelled texts" in str(side_by_side(found, loaded))
    write_report(found, tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "5-NN accuracy" in page
    assert "V-measure" in page
