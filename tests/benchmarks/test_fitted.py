"""What texts a recipe is fitted on, and how a fit's score stands beside that of the other half's texts."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import fitted
import records
from fitted import OTHER, OWN, PACKAGE, Domain
from st_reba.compare.choice import Halves
from st_reba.data.demo import demo_sentences
from st_reba.data.tables import Pairs
from st_reba.recipes.lookup import find

PART = find("echo-topic").row.around
SHARES = (0.5, 0.5)


@pytest.fixture
def own() -> Domain:
    """Two texts that are alike, and two that are not, in turn; and 60 others."""
    left, right = ([f"{side} {number}" for number in range(120)] for side in ("left", "right"))
    pairs = Pairs(left, right, [float(number % 2 == 0) for number in range(120)], two_classes=True)
    return Domain("own", "en", pairs, [f"own {number}" for number in range(60)])


@pytest.fixture
def other() -> Domain:
    return Domain("other", "en", Pairs([], [], []), [f"other {number}" for number in range(300)])


@pytest.fixture
def rows(own, other) -> fitted.Rows:
    """Vectors of two parts. Of the own texts, one dimension of each says nothing, and varies most."""
    draw = np.random.default_rng(0)
    loud = np.tile([30.0, 1.0, 1.0, 1.0], 2)
    first, said = draw.normal(size=(120, 8)), np.array(own.pairs.scores)[:, None] * (loud == 1)
    second = draw.normal(size=(120, 8)) + said * first
    vectors = dict(zip(own.pairs.first, first * loud, strict=True))
    vectors |= dict(zip(own.pairs.second, second * loud, strict=True))
    vectors |= dict(zip(own.train, draw.normal(size=(60, 8)) * loud, strict=True))
    plain = [*other.train, *demo_sentences()]
    vectors |= dict(zip(plain, draw.normal(size=(len(plain), 8)), strict=True))
    return {text: torch.from_numpy(vector).float() for text, vector in vectors.items()}


def test_each_half_is_fitted_on_texts_that_are_not_its_own(own, other):
    halves = Halves.of(own.pairs)
    found = fitted.fits(own, halves, other, PART)
    assert list(found) == [OWN, PACKAGE, OTHER, "50 training texts"]
    for half, texts in zip(halves.parts, found[OWN], strict=True):
        assert len(texts) == 120
        assert not set(texts) & set(half.texts())
    assert {name: len(texts[0]) for name, texts in found.items()} == {
        OWN: 120, PACKAGE: 200, OTHER: 200, "50 training texts": 50
    }  # fmt: skip
    assert OTHER not in fitted.fits(own, halves, None, PART)


def test_statistics_of_other_texts_score_less_where_these_vary_otherwise(own, other, rows, tmp_path):
    halves = Halves.of(own.pairs)
    compare = partial(fitted.look_up, PART, SHARES, rows)
    found = fitted.by_fit(halves, fitted.fits(own, halves, other, PART), compare)
    without = fitted.by_fit(halves, fitted.fits(own, halves, None, PART), compare)
    about = {"model": "any", "set": "own", "recipe": "echo-topic"}
    made = {row["fitted_on"]: row for row in fitted.rows_of(found, about)}
    assert made[OWN]["low"] < made[OWN]["score"] < made[OWN]["high"]
    assert "ahead" not in made[OWN]
    for name in (PACKAGE, OTHER):
        assert made[name]["ahead"] == pytest.approx(made[name]["score"] - made[OWN]["score"])
        assert made[name]["ahead_high"] < 0
    near = made["50 training texts"]
    assert near["ahead_low"] < 0 < near["ahead_high"]
    mean = fitted.mean_of([found, without])
    assert mean.recipes == [OWN, PACKAGE, "50 training texts"]
    assert mean.scores == pytest.approx(without.scores)
    records.rewrite("fitted", [*made.values(), *fitted.rows_of(mean, {**about, "set": "mean", "sets": 2})], tmp_path)
    read = records.read("fitted", tmp_path)
    assert read.height == 7
    assert read["sets"].to_list() == [2] * 3 + [None] * 4
