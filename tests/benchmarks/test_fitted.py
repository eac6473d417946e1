"""Texts that a recipe is fitted on, and the lead of a fit over the other half's texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fitted
from fitted import OTHER, OWN, PACKAGE, Domain
from real.kept import behind
from st_reba.data.tables import Pairs


def test_statistics_of_other_texts_score_less_where_these_vary_otherwise():
    """Pairs that are alike in all but one dimension of each part, which varies most."""
    left, right = ([f"{side} {number}" for number in range(120)] for side in ("left", "right"))
    pairs = Pairs(left, right, [float(number % 2 == 0) for number in range(120)], two_classes=True)
    own = Domain("own", "en", pairs, [f"own {number}" for number in range(60)])
    other = Domain("other", "en", Pairs([], [], []), [f"other {number}" for number in range(300)])
    package = [f"package {number}" for number in range(200)]
    draw, loud = np.random.default_rng(0), np.tile([30.0, 1.0, 1.0, 1.0], 2)
    first, said = draw.normal(size=(120, 8)), np.array(pairs.scores)[:, None] * (loud == 1)
    vectors = dict(zip(left, first * loud, strict=True))
    vectors |= dict(zip(right, (draw.normal(size=(120, 8)) + said * first) * loud, strict=True))
    vectors |= dict(zip(own.train, draw.normal(size=(60, 8)) * loud, strict=True))
    vectors |= dict(zip([*other.train, *package], draw.normal(size=(500, 8)), strict=True))

    def filtered(texts, fit):
        some, seen = (torch.tensor(np.stack([vectors[text] for text in each])).float() for each in (texts, fit))
        return behind("standardised sum", some, seen, (0.5, 0.5))

    splits = fitted.split(pairs)
    fits = fitted.fits(own, splits, other, package)
    assert {name: len(texts[0]) for name, texts in fits.items()} == {
        OWN: 120, PACKAGE: 200, OTHER: 200, "50 training texts": 50
    }  # fmt: skip
    for half, texts in zip(splits.halves, fits[OWN], strict=True):
        assert not set(texts) & set(splits.data.part(half.tolist()).texts())
    found = fitted.by_fit(splits, fits, filtered)
    rows = {row["fitted_on"]: row for row in fitted.rows_of(list(fits), found, {})}
    for name in (PACKAGE, OTHER):
        assert rows[name]["ahead"] == pytest.approx(rows[name]["score"] - rows[OWN]["score"])
        assert rows[name]["ahead_high"] < 0
    assert rows["50 training texts"]["ahead_low"] < 0 < rows["50 training texts"]["ahead_high"]
