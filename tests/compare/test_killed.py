from __future__ import annotations

import dataclasses
import os
import signal
import sys

import pytest
import torch

from st_reba import CausalTransformer
from st_reba.compare import Recipes, TensorCache, compare
from st_reba.compare.recipes import ModulePass, SweepPass
from st_reba.data.tables import Pairs
from st_reba.evaluation import OddOneOutEvaluator, Question
from st_reba.recipes import asked_for

from ..backbones import TEXTS

pytestmark = pytest.mark.usefixtures("timed_once")

MANY = [f"{text} {number}" for number in range(2) for text in TEXTS]
PAIRS = Pairs(MANY, MANY[::-1], [float(place % 5) for place in range(len(MANY))])
WORDS = OddOneOutEvaluator(
    [
        Question("cat", ("a cat ran", "the cat sat", "my cat eats", "cat is a word"), 3),
        Question("dog", ("dog is a word", "the dog sat", "my dog eats", "a dog ran"), 0),
    ]
)


def found(path, directory, texts=None):
    asked = asked_for(["reba-2", "prompteol", "classical+whitened"], 2, MANY)
    kept = None if directory is None else TensorCache(directory)
    recipes = Recipes(CausalTransformer(path), asked, batch_size=4, kept=kept)
    made = compare(recipes, PAIRS if texts is None else texts, WORDS)
    # What is measured with a clock is never the same.
    results = [dataclasses.replace(result, cost=None, sentences_per_second=None) for result in made.results]
    return dataclasses.replace(made, results=results, answer="", use="", verdict=[])


@pytest.mark.skipif(sys.platform == "win32", reason="a process is forked to be killed")
def test_a_run_that_was_killed_goes_on_to_the_same(shallow_path, tmp_path, monkeypatch):
    whole = found(shallow_path, None)
    child = os.fork()
    if child == 0:
        moved, replace = [], os.replace

        def dying(source, target):
            moved.append(target)
            if len(moved) == 9:
                # In the middle of a file, which is written and not yet in its place.
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        os.replace = dying
        found(shallow_path, tmp_path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
    assert len(list(tmp_path.glob(".writing-*"))) == 1
    assert found(shallow_path, tmp_path) == whole
    assert not list(tmp_path.glob(".writing-*"))

    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(ModulePass, "encode", never)
    monkeypatch.setattr(SweepPass, "encode", never)
    assert found(shallow_path, tmp_path) == whole


def test_other_weights_and_other_settings_are_not_taken_for_these(roomy_path, tmp_path):
    files = set()
    backbone = CausalTransformer(roomy_path)
    for change in ("nothing", "batch", "weights", "length"):
        if change == "weights":
            with torch.no_grad():
                next(backbone.model.parameters()).mul_(1.5)
        if change == "length":
            backbone.max_seq_length = 5
        batch_size = 3 if change == "batch" else 4
        recipes = Recipes(backbone, asked_for(["classical"]), batch_size=batch_size, kept=TensorCache(tmp_path))
        recipes.add(TEXTS)
        now = set(tmp_path.glob("*.safetensors"))
        # The bag, and the classical embedding.
        assert len(now - files) == 2, change
        files = now
