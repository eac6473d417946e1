"""Cross-fitted scores are those of a plain loop over splits, and over replicates."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from sklearn.metrics import average_precision_score

from st_reba.compare.recipes import in_short, with_candidates
from st_reba.compare.splits import CrossFit, Splits
from st_reba.data.tables import Pairs
from st_reba.evaluation.bootstrap import draw_weights
from st_reba.recipes import find

ORACLES = {
    "mean": lambda values, labels: values.mean(),
    "spearman": lambda values, labels: scipy.stats.spearmanr(values, labels)[0],
    "average_precision": lambda values, labels: average_precision_score(labels, values),
}


@pytest.mark.parametrize("kind", ORACLES)
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
