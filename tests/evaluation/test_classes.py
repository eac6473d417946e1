"""Texts in classes: nearest neighbours as they are written down plainly, and clusters by scikit-learn."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import v_measure_score

from st_reba.data.tables import Classes
from st_reba.evaluation.embedded import Embedded, stand_in
from st_reba.evaluation.tasks import Vectors, task_of, v_measure_shares


def texts_in(labels):
    return Classes({f"text {place}": label for place, label in enumerate(labels)})


def vectors_of(data, seed=0):
    """Of each text one that lies near those of its class."""
    draw, centres = np.random.default_rng(seed), {}
    for label in data.labels.values():
        centres.setdefault(label, draw.normal(size=6))
    # Of any length: only the direction counts.
    return {
        text: torch.tensor((centres[label] + draw.normal(size=6)) * draw.uniform(0.1, 9), dtype=torch.float32)
        for text, label in data.labels.items()
    }


def similarity(vectors):
    return Vectors(lambda texts, role: torch.stack([vectors[text] for text in texts]))


@given(st.lists(st.sampled_from("abcdefgh"), min_size=3, max_size=40), st.integers(0, 9))
def test_the_nearest_vote(labels, seed):
    """With fewer texts than neighbours, classes of one text, and as many votes for one class as for another."""
    data = texts_in(labels)
    task, vectors = task_of(data), vectors_of(data, seed)
    assume(task.scorable)
    expected = []
    for text, label in data.labels.items():
        cosines = {
            other: torch.cosine_similarity(vectors[text], vectors[other], dim=0) for other in vectors if other != text
        }
        nearest = [data.labels[other] for other in sorted(cosines, key=cosines.get, reverse=True)[:5]]
        # Of equals it gives the first that it met.
        [(voted, _)] = Counter(nearest).most_common(1)
        expected.append(voted == label)
    assert task.measure(similarity(vectors))["right"].tolist() == expected
    assert task.column.chance == max(Counter(labels).values()) / len(labels)
    assert not any(right for right, label in zip(expected, labels, strict=True) if labels.count(label) == 1)


def test_clusters_and_the_evaluator():
    data = texts_in("abcabcaabbccd" * 4)
    vectors = vectors_of(data)
    rows = np.stack([(vector / vector.norm()).numpy() for vector in vectors.values()])
    clusters = KMeans(4, n_init=10, random_state=0).fit_predict(rows)
    expected = v_measure_score(list(data.labels.values()), clusters)
    task = task_of(data)
    measured = task.measure(similarity(vectors))
    assert 0.2 < measured["agreement"].mean() == pytest.approx(expected, abs=1e-6)
    model = stand_in(Embedded(lambda texts, prompt: {"x": torch.stack([vectors[text] for text in texts])}), "x")
    assert task(model) == {"knn_accuracy": measured["right"].mean(), "v_measure": pytest.approx(expected, abs=1e-6)}
    assert task.primary_metric == "knn_accuracy"
    columns = task.columns({"x": measured}, {"tf-idf": measured})
    assert [(column.name, items.scores[1]) for column, items in columns] == [
        ("Classes", measured["right"].mean()), ("Clusters", pytest.approx(expected, abs=1e-6))
    ]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=60))
def test_shares_are_v_measure_and_its_influence(drawn):
    """Their mean is V; and what V loses as a text counts a little less is as much as its share says."""
    classes, clusters = np.transpose(drawn)
    assume(len(set(classes.tolist())) > 1)
    shares = v_measure_shares(classes, clusters)
    assert shares.mean() == pytest.approx(v_measure_score(classes, clusters), abs=1e-9)
    many, step = 500, 1 / (500 * len(drawn))
    for place in (0, len(drawn) - 1):
        less = [np.delete(np.tile(column, many), place) for column in (classes, clusters)]
        lost = v_measure_score(classes, clusters) - v_measure_score(*less)
        assert (shares[place] - shares.mean()) * step == pytest.approx(lost, abs=1e-2 * step)


@pytest.mark.parametrize("labels", ["aaaa", "abcd"])
def test_labels_that_leave_nothing_to_score(labels):
    task = task_of(texts_in(labels))
    assert not task.scorable
    assert all(np.isnan(own).all() and len(own) for own in task.measure(similarity(vectors_of(task.data))).values())


def test_a_recipe_without_numbers_has_no_score_and_one_that_tells_nothing_apart_a_low_one(recwarn):
    data = texts_in("ab" * 10 + "c")
    task = task_of(data)
    [alike, broken] = (
        task.measure(similarity(dict.fromkeys(data.labels, torch.full((3,), value)))) for value in (1.0, math.nan)
    )
    assert alike["agreement"].mean() == pytest.approx(0, abs=1e-9)
    assert {name: own.shape for name, own in alike.items()} == {name: own.shape for name, own in broken.items()}
    assert all(np.isnan(own).all() for own in broken.values())
    assert not recwarn.list
