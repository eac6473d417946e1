"""Every recipe is right on every architecture of transformers, or refused in a sentence that names the class."""

from __future__ import annotations

import pytest

import architectures
import records
from st_reba.lm.attention.hooks import RunningMaximum


@pytest.fixture(autouse=True)
def silence():
    with architectures.silence():
        yield


def faults(name, *recipes):
    found = architectures.surveyed(name, recipes or architectures.RECIPES)
    return {recipe: own.sentence for recipe, own in found.items() if own.verdict == "fault"}


@pytest.mark.long
@pytest.mark.parametrize("name", architectures.names())
def test_every_recipe(name):
    assert faults(name) == {}


@pytest.mark.parametrize(
    ("name", "recipe", "verdict"),
    [
        # "linear" before the mixer is no feed-forward part; one norm is at both ends; four streams are no states.
        ("zamba2", "prompteol", "right"),
        ("nanochat", "classical@2", "right"),
        ("nanochat", "early-late", "right"),
        ("gemma3n_text", "topic", "refused"),
        ("rwkv", "reba-2", "refused"),
    ],
)
def test_parts_whose_names_lie(name, recipe, verdict):
    assert architectures.surveyed(name, [recipe])[recipe].verdict == verdict


def test_a_fault_is_found(monkeypatch):
    symmetrised = RunningMaximum.symmetrised
    monkeypatch.setattr(RunningMaximum, "symmetrised", lambda hook: 1.001 * symmetrised(hook))
    assert [*faults("llama", "reba-2", "classical")] == ["reba-2"]
    monkeypatch.setattr(RunningMaximum, "symmetrised", lambda hook: 1 / 0)
    assert faults("llama", "reba-2") == {"reba-2": "ZeroDivisionError: division by zero"}


def test_the_file_has_no_fault():
    rows = records.read("architectures")
    assert {*rows["verdict"]} == {"right", "refused", "not built"}
    assert {*rows["recipe"]} == {*architectures.RECIPES, "all"}
    assert rows.filter(rows["sentence"] == "")["verdict"].unique().to_list() == ["right"]
