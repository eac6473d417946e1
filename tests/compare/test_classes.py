"""Texts with a label each: compared, saved, held against others, and searched."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from st_reba import CausalTransformer
from st_reba.compare import Recipes, compare
from st_reba.compare.against import side_by_side
from st_reba.compare.report import write_report
from st_reba.compare.results import Comparison
from st_reba.compare.search import PLAIN, candidates, search, split, with_selection
from st_reba.compare.tf_idf import TfIdf
from st_reba.data.tables import Classes
from st_reba.evaluation.tasks import task_of
from st_reba.recipes import default_recipes

pytestmark = pytest.mark.usefixtures("quick")

SUBJECTS = {"animal": ("the cat", "a dog", "this horse"), "weather": ("the rain", "a storm", "this fog")}
DATA = Classes(
    {f"{subject} came {day} of May": label for day in range(12) for label, own in SUBJECTS.items() for subject in own}
    | {"nothing else": "other"}
)


@pytest.fixture(scope="module")
def backbone(backbone_path):
    return CausalTransformer(backbone_path("llama"))


@pytest.fixture(scope="module")
def found(backbone, quick):
    return compare(Recipes(backbone, default_recipes(1)[:2]), DATA)


def test_tf_idf_is_a_control_of_both_scores(backbone):
    """It tells these classes apart: each subject is a word of one class alone."""
    tf_idf = TfIdf(backbone, DATA.texts())
    vectors = tf_idf.unit_vectors(DATA.texts())
    tokens = backbone.token_ids(DATA.texts())
    plain = TfidfVectorizer(analyzer=list, lowercase=False).fit_transform(tokens)
    assert (vectors @ vectors.T).toarray() == pytest.approx((plain @ plain.T).toarray())
    assert vectors.shape[1] == len({token for ids in tokens for token in ids})
    measured = task_of(DATA).measure(tf_idf)
    assert measured["right"].mean() > 0.9
    assert len(measured["agreement"]) == len(DATA) == len(measured["right"]) + 1


def test_every_recipe_has_both_scores_and_every_control(found):
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


def test_what_was_found_is_saved_shown_and_held_against_another(found, tmp_path):
    found.save(tmp_path / "comparison.json")
    loaded = Comparison.load(tmp_path / "comparison.json")
    assert loaded.tasks == found.tasks
    assert loaded.items.kind == "mean"
    assert np.shape(loaded.items.values["tf-idf, mean"]) == (len(DATA) - 1,)
    told = side_by_side(found, loaded)
    assert "both comparisons are of the same labelled texts" in str(told)
    write_report(found, tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "5-NN accuracy" in page
    assert "V-measure" in page


def test_a_search_chooses_on_one_half_and_shows_the_other(backbone):
    chosen_on, held_out = split(DATA)
    assert chosen_on.labels | held_out.labels == DATA.labels
    assert not chosen_on.labels.keys() & held_out.labels.keys()
    every = [each for each in candidates(3) if each.row.name == "Classical" and each.layer in (2, None)]
    found = search(backbone, DATA, every=every)
    task = task_of(found.chosen_on)
    scores = [task(recipe.model(backbone))["knn_accuracy"] for recipe in (found.recipes()[0], PLAIN)]
    assert found.gain == pytest.approx(scores[0] - scores[1], abs=0.05)
    shown = compare(Recipes(backbone, found.recipes()), found.held_out, chosen=found.chosen, random=False)
    assert f"of {len(held_out)} other texts, which it never read." in with_selection(found, shown).verdict[0]
