from __future__ import annotations

import dataclasses
import json
import math

import pytest

from st_reba.compare.results import Comparison, Result, Task
from st_reba.evaluation.bootstrap import Estimate

from .report import samples


@pytest.fixture
def comparison():
    first, *others = samples.demo().results
    first = dataclasses.replace(first, same_as=("ReBA-1", "Bidirectional"), cost=None)
    return dataclasses.replace(
        samples.demo(), results=[first, *others], skipped=[("RT-2, last", "no cache")], answer="是"
    )


def test_what_is_saved_is_loaded(comparison, tmp_path):
    comparison.save(tmp_path / "comparison.json")
    assert Comparison.load(tmp_path / "comparison.json") == comparison


def test_what_is_no_number_is_null(tmp_path):
    path = tmp_path / "comparison.json"
    scores = {"A": Estimate(0.5, math.nan, math.nan, tied=True)}
    Comparison("m", "d", [Task("A", "accuracy")], [Result("Echo-2", "mean", False, scores)]).save(path)
    text = path.read_text(encoding="utf-8")
    assert "NaN" not in text
    assert json.loads(text)["results"][0]["scores"]["A"] == {"value": 0.5, "low": None, "high": None, "tied": True}
    found = Comparison.load(path).results[0].scores["A"]
    assert (found.value, found.tied) == (0.5, True)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tasks": [], "results": [{}], "skipped": []}', '{"results": [1]}'])
def test_what_is_no_comparison(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="other.json is no comparison that st_reba .* reads"):
        Comparison.load(path)


def test_fields_of_another_version(comparison, tmp_path):
    path = tmp_path / "comparison.json"
    comparison.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "temperature": 1}), encoding="utf-8")
    with pytest.raises(ValueError, match="temperature"):
        Comparison.load(path)
