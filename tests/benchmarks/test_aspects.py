"""Neighbours by one label among the texts that differ in the other, and how far a reading is ahead of another."""

from __future__ import annotations

import numpy as np
import pytest

import aspects
from aspects import KINDS, SETS


@pytest.fixture
def labels():
    """Ten texts of each of two things with each of two actions."""
    things, actions = np.repeat(["light", "volume"], 20), np.tile(["up", "down"], 20)
    return dict(zip(KINDS, (things, actions), strict=True))


def axes(labels, *weights):
    """Vectors that say a kind as loud as its weight, and something of their own."""
    own = np.random.default_rng(0).normal(scale=0.1, size=(40, 6))
    for axis, (kind, weight) in enumerate(zip(KINDS, weights, strict=True)):
        own[:, axis] += weight * np.where(labels[kind] == labels[kind][0], 1, -1)
    return own.astype(np.float32)


def test_what_a_vector_says_loudest_is_what_its_neighbours_share(labels):
    thing, action = axes(labels, 3, 1), axes(labels, 0, 1)
    assert aspects.shares(thing, labels, KINDS[0]).mean() == 1
    # Among the texts about the other thing, it tells the actions apart all the same.
    assert aspects.shares(thing, labels, KINDS[1]).mean() == 1
    assert aspects.shares(action, labels, KINDS[1]).mean() == 1
    assert 0.3 < aspects.shares(action, labels, KINDS[0]).mean() < 0.7


def test_rows_hold_each_reading_against_the_one_without_an_aspect(labels):
    found = {
        ("plain", ""): axes(labels, 0, 0), ("own", KINDS[0]): axes(labels, 1, 0), ("own", KINDS[1]): axes(labels, 0, 0),
    }  # fmt: skip
    every = aspects.rows_of(found, labels, ("plain", ""))
    rows = {(row["recipe"], row["aspect"], row["kind"]): row for row in every}
    ahead = rows["own", KINDS[0], KINDS[0]]
    assert ahead["score"] - rows["plain", "", KINDS[0]]["score"] == pytest.approx(ahead["ahead"])
    assert 0 < ahead["ahead_low"] <= ahead["ahead"] <= ahead["ahead_high"]
    assert ahead["score"] - rows["own", KINDS[1], KINDS[0]]["score"] == pytest.approx(ahead["steered"])
    assert ahead["steered_low"] > 0
    assert rows["own", KINDS[1], KINDS[1]]["steered_low"] <= 0
    assert not {"ahead", "steered"} & rows["plain", "", KINDS[0]].keys()
    assert "steered" not in rows["own", KINDS[1], KINDS[0]]


def test_each_pair_of_labels_has_as_many_texts(tmp_path):
    folder = tmp_path / "hwu" / "origin_data"
    folder.mkdir(parents=True)
    names = [name for own in SETS for name in own.classes.values()]
    lines = [f"{name} {number}\t{name}" for name in names for number in range(9)]
    (folder / "train.tsv").write_text("\n".join(["text\tlabel", *lines, *lines]), encoding="utf-8")
    for own in SETS:
        texts, labels = aspects.drawn(own, tmp_path, "train", 4)
        assert len({*texts}) == len(texts) == 4 * len(own.classes)
        pairs = {*zip(*(labels[kind] for kind in KINDS), strict=True)}
        assert pairs == {*own.classes}
        assert all(
            own.classes[pair] in text for pair, text in zip(zip(*labels.values(), strict=True), texts, strict=True)
        )
