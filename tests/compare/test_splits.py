"""Halves share no text and do not depend on the file's order; cross-fitted scores are those of a plain loop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from st_reba.compare.recipes import in_short, with_candidates
from st_reba.compare.splits import SPLITS, CrossFit, Splits, in_order
from st_reba.data.tables import Classes, Pairs, Retrieval, Triplets
from st_reba.evaluation.bootstrap import draw_weights
from st_reba.recipes import find

from ..evaluation.test_bootstrap import ORACLES

TEXTS = [f"text {number}" for number in range(400)]


def pairs(scores, texts=TEXTS):
    return Pairs(list(texts[: len(scores)]), list(texts[-len(scores) :]), [float(score) for score in scores])


def classes(sizes):
    return Classes(dict(zip(TEXTS, [str(n) for n, size in enumerate(sizes) for _ in range(size)], strict=False)))


def retrieval(count, documents):
    """Each query has a relevant document, of so many."""
    return Retrieval(
        {f"q{number}": TEXTS[number] for number in range(count)},
        {f"d{number}": f"document {number}" for number in range(documents)},
        {f"q{number}": (f"d{number % documents}",) for number in range(count)},
    )


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70), st.integers(0, 3)), min_size=60, max_size=120))
def test_items_that_share_a_text_stay_together(rows):
    """Directly or by others; each half is the rest of the other."""
    data = Pairs([f"a {one}" for one, _, _ in rows], [f"b {two}" for _, two, _ in rows], [own[2] / 1 for own in rows])
    splits = Splits.of(data)
    items = splits.data.items()
    for one, other in itertools.combinations(range(len(items)), 2):
        if set(items[one]) & set(items[other]):
            assert splits.groups[one] == splits.groups[other]
    assert sorted(set(splits.groups)) == list(range(max(splits.groups) + 1))
    for first, second in zip(splits.halves[::2], splits.halves[1::2], strict=False):
        assert sorted([*first, *second]) == list(range(len(items)))
        assert not set(splits.groups[first]) & set(splits.groups[second])


HALVED = [
    (pairs([number % 3 == 0 for number in range(90)]), lambda data: data.scores),
    (classes([11, 30, 20]), lambda data: list(data.labels.values())),
    (pairs(range(100)), lambda data: [score // 20 for score in data.scores]),
]


@pytest.mark.parametrize(("data", "stratum"), HALVED)
def test_halves_are_alike(data, stratum):
    splits = Splits.of(data)
    assert splits.chooses
    assert splits.sure
    assert len(splits.halves) == 2 * SPLITS
    assert len({tuple(half) for half in splits.halves}) == 2 * SPLITS
    for first, second in zip(splits.halves[::2], splits.halves[1::2], strict=True):
        counts = [np.unique(np.array(stratum(splits.data))[half], return_counts=True)[1] for half in (first, second)]
        assert np.abs(counts[0] - counts[1]).max() <= 1
    assert splits.directions[:2] == [(0, 1), (1, 0)]


@given(st.permutations(range(60)), st.integers(0, 3))
def test_the_files_order_and_copies_change_nothing(order, seed):
    data = pairs([number % 7 for number in range(60)])
    expected = Splits.of(data, seed=seed)
    again = Splits.of(data.part([*order, *order[:4]]), seed=seed)
    assert in_order(data.part(order)) == again.data == expected.data
    assert all(map(np.array_equal, again.halves, expected.halves))
    assert again.notes == ("4 of 64 pairs are copies of others and count once.",)
    assert not all(map(np.array_equal, Splits.of(data, seed=seed + 1).halves, expected.halves))


NOT_HALVED = [
    (pairs([number < 15 for number in range(60)]), "8 pairs of either kind: give more pairs."),
    (classes([9, 40]), "5 texts of each class: give more texts."),
    (pairs(range(39)), "20 pairs: give more pairs."),
    (pairs([1] * 60), "20 pairs: give more pairs."),
    (Triplets(TEXTS[:39], TEXTS[40:79], TEXTS[80:119]), "20 triplets: give more triplets."),
    (retrieval(39, 39), "20 queries: give more queries."),
]


@pytest.mark.parametrize(("data", "least"), NOT_HALVED)
def test_what_cannot_be_halved(data, least):
    splits = Splits.of(data)
    note = f"Recipes are compared as they are. To choose their settings each half needs {least}"
    assert splits.notes == (note,)
    assert (splits.sure, splits.chooses, splits.directions, splits.fit_on) == (True, False, [(0, 0)], [])
    assert Splits.of(data, choose=False).notes == ()


def test_items_that_hang_together():
    """Over a fifth of them, by relevant documents; or so many that few groups are left."""
    splits = Splits.of(retrieval(60, 4))
    assert (splits.sure, len(splits.halves)) == (False, 1)
    assert splits.notes == (
        "15 of 60 queries hang together by texts that they share: nothing is chosen, and there are no intervals. Give "
        "queries of more texts.",
    )
    few = Splits.of(retrieval(60, 12))
    assert (few.sure, few.chooses) == (False, True)
    assert few.notes == ("There are no intervals: 12 groups of queries that share no text are too few.",)


def test_what_filters_are_fitted_on():
    """The texts of the half that chooses, and all of them at the end; none where a half has under fifty."""
    splits = Splits.of(pairs(range(60)))
    assert [len(texts) for texts in splits.fit_on] == [60] * 2 * SPLITS + [120]
    assert set(splits.fit_on[0]) == set(splits.data.part(splits.halves[0].tolist()).texts())
    assert Splits.of(pairs(range(44))).fit_on == []


@pytest.mark.parametrize("kind", ["mean", "spearman", "average_precision"])
@pytest.mark.parametrize("fitted", [True, False])
def test_a_plain_loop(kind, fitted):
    """Each replicate repeats its items, and chooses anew."""
    draw, count = np.random.default_rng(0), 80
    labels = draw.integers(2, size=count).astype(float)
    first, second = ([f"{side} {number // 2}" for number in range(count)] for side in "ab")
    splits = Splits.of(Pairs(first, second, list(range(count))))
    # As an order by texts would not be that of the labels.
    labels = labels[np.argsort(splits.data.scores)]
    places = len(splits.halves) + 1
    noise = draw.normal(size=(places if fitted else 1, 3, count))

    def values(choosing, half):
        items = np.arange(count) if half == places - 1 else splits.halves[half]
        return (labels + noise[choosing if fitted else 0])[:, items]

    row = CrossFit(splits, kind, labels).row(values, 3, fitted=fitted)

    def score(choosing, half, candidate, times):
        items = np.arange(count) if half == places - 1 else splits.halves[half]
        repeated = np.repeat(np.arange(len(items)), times[items].astype(int))
        return ORACLES[kind](values(choosing, half)[candidate][repeated], labels[items][repeated])

    weights = draw_weights(splits.groups)
    for column in (0, 1, 2, 17):
        found, chosen = [], []
        for choosing, scoring in splits.directions:
            scores = [score(choosing, choosing, candidate, weights[column]) for candidate in range(3)]
            chosen.append(int(np.argmax(scores)))
            found.append(score(choosing, scoring, chosen[-1], weights[column]))
        expected = row.score if column == 0 else row.drawn[column - 1]
        assert np.mean(found) == pytest.approx(expected, abs=1e-9)
        if column == 0:
            assert row.chosen == tuple(chosen)
    last = places - 1
    assert row.built == np.argmax([score(last, last, candidate, weights[0]) for candidate in range(3)])


def test_without_a_choice_the_score_is_of_all_items():
    splits = Splits.of(Pairs(list("abcdef"), list("ghijkl"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    values = np.random.default_rng(0).normal(size=(1, 6))
    row = CrossFit(splits, "spearman", splits.data.scores).row(lambda choosing, half: values)
    assert row.score == pytest.approx(scipy.stats.spearmanr(values[0], splits.data.scores)[0])
    assert (row.chosen, row.built) == ((0,), 0)


def test_the_candidates_of_a_recipe():
    """Its own layer, the one below and nine tenths; its words; each part twice. The recipe as it is comes first."""
    found = {
        key: [in_short(own) for own in with_candidates(find(key), 30)]
        for key in ("classical", "reba-2", "prompteol", "prompteol@20", "topic", "early-late")
    }
    assert found["classical"] == found["reba-2"] == [""]
    assert found["prompteol@20"] == ["@20"]
    assert found["prompteol"] == ["", "@29", "@27"]
    assert found["early-late"] == ["", "part 1 twice", "part 2 twice"]
    assert found["topic"][:4] == ["", "part 1 twice", "part 2 twice", "meaning"]
    assert len(set(found["topic"])) == len(found["topic"]) == 3 * 4 * 3
