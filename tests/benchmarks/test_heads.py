"""What the benchmark of heads reads from kept weights is what ReBA gives with these heads."""

from __future__ import annotations

import numpy as np
import pytest

import heads
import sinks
from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.evaluation import bootstrap
from st_reba.reading.words import encode_words

from ..conftest import pipeline, relative_error

TEXTS = ["the quick brown fox jumps", "the dog chased the brown cat", "a brown fox"]
WORDS = ["fox", "chased", "brown"]
LAYERS, HEADS = 3, 4


@pytest.fixture
def kept(shared):
    arrays = heads.ran(ReBAModule(shared()).eval(), TEXTS, WORDS)
    return [heads.Text(*(arrays[f"{name} {text}"] for name in ("weights", "states", "rows"))) for text in range(3)]


@pytest.mark.parametrize("layers", ["all", [0], [1, 2]])
def test_any_layers_from_one_pass(layers, kept, shared):
    """With the heads of some layers, words are those of ReBA's own ``layers``."""
    every = np.arange(LAYERS * HEADS) // HEADS
    chosen = np.isin(every, range(LAYERS) if layers == "all" else layers)
    expected = encode_words(pipeline(ReBAModule(shared(), layers=layers)), TEXTS, WORDS)
    assert relative_error(np.stack([text.read(chosen[None])[0] for text in kept]), expected) < 1e-5


def test_what_is_read_without_heads(kept, shared):
    own = {heads.CLASSICAL: CausalTransformer(shared()), heads.ECHO: EchoModule(shared())}
    for name, module in own.items():
        found = np.stack([text.references()[name] for text in kept])
        assert relative_error(found, encode_words(pipeline(module), TEXTS, WORDS)) < 1e-5


def test_what_is_chosen():
    """A head that is best alone, and a layer that is missed most and one that harms, are found on one set."""
    every = heads.subsets(20, 2)
    scores = dict.fromkeys(every, 0.5)
    scores |= {"head 3.1": 0.9, "head 7.0": 0.8, "head 7.1": 0.7, "head 9.0": 0.6, "layer 4": 0.9}
    scores |= {"without layer 5": 0.1, "without layer 6": 0.6}
    picks = heads.chosen(scores, 20, 2)
    assert np.flatnonzero(picks["the tenth that is best alone"]).tolist() == [7, 14, 15, 18]
    assert np.flatnonzero(picks["the best layer"]).tolist() == [8, 9]
    assert np.flatnonzero(~picks["without the layer that is missed most"]).tolist() == [10, 11]
    assert np.flatnonzero(~picks["without the layers that harm"]).tolist() == [12, 13]


def test_the_best_way_of_each_kind_is_shown_beside_what_it_is_held_against():
    """And beside the one that turns as many layers and hides nothing."""
    question = sinks.Question("pairs", [], None, lambda vectors: {}, bootstrap.mean)
    made = {
        (way, "mean"): np.arange(10.0) + number * (way.layers in ("last 2, hidden in the last 1", "last 1"))
        for number, way in enumerate(sinks.ways(4, 0)) if way.recipe == "classical"
    }  # fmt: skip
    picks = sinks.chosen(question, made)
    layers = {(way.change, way.layers) for way, _ in picks}
    assert {(sinks.BOTH, "last 2, hidden in the last 1"), (sinks.BOTH_WAYS, "last 2"),
            (sinks.BOTH_WAYS, "last 1")} <= layers  # fmt: skip
    assert sum(way.change == sinks.HIDDEN for way, _ in picks) == 1
