"""Halves share no text, are balanced, and do not depend on the file's order; what cannot be halved is said."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from st_reba.compare.splits import SPLITS, Splits, in_order
from st_reba.data.tables import Classes, Pairs, Retrieval, Triplets

TEXTS = [f"text {number}" for number in range(400)]


def pairs(scores, texts=TEXTS):
    return Pairs(list(texts[: len(scores)]), list(texts[-len(scores) :]), [float(score) for score in scores])


def classes(sizes):
    return Classes(
        dict(zip(TEXTS, [str(place) for place, size in enumerate(sizes) for _ in range(size)], strict=False))
    )


def retrieval(count, documents):
    """Each query has a relevant document, of so many."""
    return Retrieval(
        {f"q{number}": TEXTS[number] for number in range(count)},
        {f"d{number}": f"document {number}" for number in range(documents)},
        {f"q{number}": (f"d{number % documents}",) for number in range(count)},
    )


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70), st.integers(0, 3)), min_size=60, max_size=120))
def test_items_that_share_a_text_stay_together(drawn):
    """Directly or by others; each half is the rest of the other."""
    data = Pairs(
        [f"a {one}" for one, _, _ in drawn], [f"b {two}" for _, two, _ in drawn], [own[2] / 1 for own in drawn]
    )
    splits = Splits.of(data)
    items = splits.data.items()
    for one, other in itertools.combinations(range(len(items)), 2):
        if set(items[one]) & set(items[other]):
            assert splits.groups[one] == splits.groups[other]
    assert sorted(set(splits.groups)) == list(range(max(splits.groups) + 1))
    for first, second in zip(splits.halves[::2], splits.halves[1::2], strict=False):
        assert sorted([*first, *second]) == list(range(len(items)))
        assert not set(splits.groups[first]) & set(splits.groups[second])


@pytest.mark.parametrize(
    ("data", "stratum"),
    [
        (pairs([number % 3 == 0 for number in range(90)]), lambda data: data.scores),
        (classes([11, 30, 20]), lambda data: list(data.labels.values())),
        (pairs(range(100)), lambda data: [score // 20 for score in data.scores]),
    ],
)
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


@pytest.mark.parametrize(
    ("data", "least"),
    [
        (pairs([number < 15 for number in range(60)]), "8 pairs of either kind: give more pairs."),
        (classes([9, 40]), "5 texts of each class: give more texts."),
        (pairs(range(39)), "20 pairs: give more pairs."),
        (pairs([1] * 60), "20 pairs: give more pairs."),
        (Triplets(TEXTS[:39], TEXTS[40:79], TEXTS[80:119]), "20 triplets: give more triplets."),
        (retrieval(39, 39), "20 queries: give more queries."),
    ],
)
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
