"""The choice of layer, words and weights: made on one half of the items, scored on the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from st_reba import CausalTransformer
from st_reba.compare import Recipes, compare
from st_reba.compare.choice import (
    CHOICE,
    LEAST_ITEMS,
    Halves,
    choices_of,
    told_of,
    with_candidates,
    wordings_of,
)
from st_reba.data.demo import demo_sentences
from st_reba.data.tables import Classes, Pairs, Retrieval
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import by_halves
from st_reba.evaluation.tasks import PairTask, task_of
from st_reba.recipes import Recipe, find
from st_reba.recipes.rows import CLASSICAL, SUM
from st_reba.text.templates import SLOT

from ..backbones import TEXTS


@pytest.fixture(scope="module")
def backbone(roomy_path):
    return CausalTransformer(roomy_path).eval()


@pytest.fixture(scope="module")
def pairs():
    """Each text in one pair alone."""
    texts = [f"{TEXTS[number % len(TEXTS)]} {number}" for number in range(140)]
    return Pairs(texts[:70], texts[70:], [float(7 * number % 11) for number in range(70)])


# The halves


@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), min_size=2 * LEAST_ITEMS, max_size=200),
    st.integers(0, 5),
)
def test_halves_share_no_text_and_lose_no_pair(drawn, seed):
    rows = [(f"a{first}", f"a{second}", float(index)) for index, (first, second) in enumerate(drawn)]
    pairs = Pairs(*(list(column) for column in zip(*rows, strict=True)))
    try:
        halves = Halves.of(pairs, seed)
    except ValueError as error:
        assert "hang together" in str(error)  # noqa: PT017 (either outcome is right, for some of the draws)
        return
    first, second = (set(half.texts()) for half in halves.parts)
    assert not first & second
    assert min(map(len, halves.parts)) >= LEAST_ITEMS
    again = [row for half in halves.parts for row in zip(half.first, half.second, half.scores, strict=True)]
    assert again == list(zip(halves.whole.first, halves.whole.second, halves.whole.scores, strict=True))
    assert sorted(again) == sorted(rows)


def test_the_seed_decides_the_halves_and_what_has_none_is_refused(pairs):
    assert Halves.of(pairs, 0) == Halves.of(pairs, 0)
    assert Halves.of(pairs, 0) != Halves.of(pairs, 1)
    with pytest.raises(ValueError, match="59 pairs are too few, give 60 or more"):
        Halves.of(pairs.part(range(59)))
    with pytest.raises(ValueError, match="80 of the 80 pairs hang together"):
        Halves.of(Pairs(["hub"] * 80, [f"text {number}" for number in range(80)], list(range(80))))


def test_a_half_is_fitted_on_the_texts_of_the_other(pairs, backbone):
    """And without halves, on those of the package."""
    assert Recipes(backbone, [find("topic")], controls=False).fit_on == [tuple(demo_sentences())]
    halves = Halves.of(pairs)
    assert halves.fit_on == [tuple(halves.parts[1].texts()), tuple(halves.parts[0].texts())]
    # Fewer than 50 texts to a half.
    each_twice = pairs.first[:62]
    assert Halves.of(Pairs(each_twice, each_twice, pairs.scores[:62])).fit_on == []


# What is free


def test_candidates_of_a_recipe():
    """Three layers, four wordings and each part twice; the recipe as it is comes first."""
    topic, echo, early_late = (find(name) for name in ("topic", "echo-2", "early-late"))
    found = with_candidates(topic, 30)
    assert len(found) == 3 * 4 * 3
    assert replace(found[0], candidate_of="") == topic
    assert len({each.result for each in found}) == len(found)
    assert {each.layer for each in found} == {None, 29, 27}
    assert [each.layer for each in with_candidates(echo, 30)] == [None, 29, 27]
    assert [each.shares for each in with_candidates(early_late, 30)] == [(), (2 / 3, 1 / 3), (1 / 3, 2 / 3)]
    # It ends a layer below the last, so that the layer below its end is another one.
    assert [each.layer for each in with_candidates(find("knowledge"), 30)] == [None, 28, 27]
    for name in ("classical", "reba-2", "echo-2@12", "value-aggregation"):
        assert with_candidates(find(name), 30) in ([find(name)], [replace(find(name), candidate_of=find(name).result)])
    assert [each.layer for each in with_candidates(echo, 1)] == [None]


def test_own_prompts_take_the_place_of_a_rows_words():
    row = find("echo-topic").row
    first, second = wordings_of([f"{SLOT} is about", f"Text: {SLOT} is about"], row)
    beginning, between, _ = row.wordings[0].template.split(SLOT)
    assert first.template == f"{beginning}{SLOT}{between}{SLOT} is about"
    assert second.template == f"Text: {SLOT}{between}{SLOT} is about"
    with pytest.raises(ValueError, match="Prompt 2, 'no slot', has 0 slots: write {text} once"):
        wordings_of([SLOT, "no slot"], row)


# The choice


def _drawn(generator, candidates, count, signal=0.0):
    """Labels, and cosines of each candidate that are alike and have a little to do with the labels."""
    labels = generator.integers(0, 6, count).astype(float)
    shared = generator.normal(size=count)
    noise = generator.normal(size=(candidates, count))
    return labels, signal * (labels - 2.5) + shared + 0.5 * noise


def _chosen(labels, cosines):
    recipes = [replace(Recipe(CLASSICAL, "mean"), layer=1 + place, candidate_of="") for place in range(len(cosines))]
    score = PairTask(Pairs(["a"] * len(labels), ["b"] * len(labels), labels.tolist())).scores[0]
    measured = {recipe.result: {"cosine": own} for recipe, own in zip(recipes, cosines, strict=True)}
    return choices_of(recipes, score, measured, len(labels) // 2), score, measured


def test_each_half_is_scored_by_what_the_other_chose():
    generator = np.random.default_rng(0)
    labels, cosines = _drawn(generator, 3, 80)
    cosines[1, :40], cosines[2, 40:] = labels[:40], labels[40:]
    choices, score, _ = _chosen(labels, cosines)
    chosen = choices[CHOICE]
    assert [recipe.layer for recipe in chosen.taken] == [2, 3]
    np.testing.assert_array_equal(chosen.measured["cosine"], [*cosines[2, :40], *cosines[1, 40:]])
    items = by_halves(score.items({CHOICE: chosen.measured}), 40)
    expected = [spearmanr(cosines[2, :40], labels[:40]).statistic, spearmanr(cosines[1, 40:], labels[40:]).statistic]
    assert items.scores[0] == pytest.approx(np.mean(expected), abs=1e-12)
    assert chosen.candidates == 3


def test_the_usual_stands_unless_another_is_ahead_by_more_than_chance():
    generator = np.random.default_rng(1)
    labels, cosines = _drawn(generator, 2, 100, signal=0.5)
    usual = replace(find("topic"), candidate_of=find("topic").result)
    other = replace(usual, layer=5)
    score = PairTask(Pairs(["a"] * 100, ["b"] * 100, labels.tolist())).scores[0]

    def taken(of_other):
        measured = {usual.result: {"cosine": cosines[0]}, other.result: {"cosine": of_other}}
        return choices_of([usual, other], score, measured, 50)[usual.result]

    # Ahead on both halves, by less than their difference varies.
    assert told_of(taken(cosines[0] + 0.01 * labels + 0.4 * cosines[1])) == ""
    better = taken(cosines[0] + 2 * labels)
    assert told_of(better) == "@5"
    assert not better.gain.tied


def test_with_random_labels_no_choice_is_surely_ahead_more_often_than_its_interval_says(monkeypatch):
    """Of 30 candidates that know nothing, one that all items choose is ahead of a control in many draws."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 100)
    generator = np.random.default_rng(2)
    honest = naive = 0
    for _ in range(60):
        labels, cosines = _drawn(generator, 30, 80)
        control = {"control": {"cosine": cosines.mean(axis=0) + 0.1 * generator.normal(size=80)}}
        choices, score, measured = _chosen(labels, cosines)
        scores = dict(zip(measured, score.items(measured).scores, strict=True))
        best = max(scores, key=scores.__getitem__)
        naive += bootstrap.difference(score.items({best: measured[best], **control}), best, "control")[0] > 0
        halves = by_halves(score.items({CHOICE: choices[CHOICE].measured, **control}), 40)
        honest += bootstrap.difference(halves, CHOICE, "control")[0] > 0
    # One in forty by its interval.
    assert honest <= 5
    assert naive >= 3 * max(honest, 2)


# All of it


def test_a_row_is_scored_half_by_half_with_filters_of_the_other_half(backbone, pairs, quick):
    """As models that are built one by one give it: each half by the other's choice and statistics."""
    halves = Halves.of(pairs)
    asked = [each for name in ("classical", "topic") for each in with_candidates(find(name), 2)]
    recipes = Recipes(backbone, asked, fit_on=halves.fit_on)
    comparison = compare(recipes, pairs, halves=halves, random=False)
    row = next(result for result in comparison.results if result.recipe == f"Topic, {SUM}")
    values = np.array(comparison.items.values[row.name])
    taken = [each for each in recipes.asked if each.candidate_of == row.name and each.result in recipes.keys]
    own = next(each for each in taken if each.key == row.spec and each.shares == row.shares
               and (each.wording.template if each.wording else "") == row.template)  # fmt: skip
    second = halves.parts[1]
    model = replace(own, fit_texts=tuple(halves.parts[0].texts())).model(backbone)
    first_side, second_side = (model.encode(side, convert_to_tensor=True) for side in (second.first, second.second))
    cosines = torch.cosine_similarity(first_side, second_side).numpy()
    np.testing.assert_allclose(values[comparison.items.first :], cosines, atol=1e-5)
    # The answer is judged by the choice of all.
    assert len(comparison.items.values[CHOICE]) == 70
    assert any("The best of all" in sentence for sentence in comparison.verdict)
    assert not any("likely too high" in sentence for sentence in comparison.verdict)


def test_documents_of_retrieval_are_in_both_halves():
    documents = {f"d{number}": f"{TEXTS[number % len(TEXTS)]} {number}" for number in range(70)}
    queries = {f"q{number}": f"which {number}" for number in range(62)}
    data = Retrieval(queries, documents, {f"q{number}": (f"d{number}",) for number in range(62)})
    halves = Halves.of(data)
    assert set(documents.values()) < set(halves.fit_on[0])


# Texts in classes

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


def test_every_row_has_both_scores_of_classes_in_halves(backbone, quick):
    halves = Halves.of(DATA)
    asked = [each for name in ("classical", "topic") for each in with_candidates(find(name), 2)]
    found = compare(Recipes(backbone, asked, fit_on=halves.fit_on), DATA, halves=halves, random=False)
    assert [task.name for task in found.tasks] == ["Classes", "Clusters"]
    assert all(result.scores.keys() == {"Classes", "Clusters"} for result in found.results)
    assert found.settings["chosen"] == "on one half of 108 texts, scored on the other, in turn"
    # The second half is among its own texts.
    second = task_of(halves.parts[1])(find("classical").model(backbone))
    own = found.items.values["Classical, mean"][found.items.first :]
    assert np.mean(own) == pytest.approx(second["knn_accuracy"])
    assert len(found.items.values[CHOICE]) == len(DATA)
