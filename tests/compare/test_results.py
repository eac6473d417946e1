from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from st_reba.compare.results import Comparison, Items, Result, Task, listed, measured
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Estimate

from .report import samples


@pytest.fixture
def comparison():
    first, *others = samples.demo().results
    first = dataclasses.replace(first, same_as=("ReBA-1", "Bidirectional"), cost=None)
    return dataclasses.replace(
        samples.demo(),
        results=[first, *others],
        skipped=[("RT-2, last", "no cache")],
        answer="是",
        items=Items("spearman", "digest", {"Echo-2, mean": [0.125, 0.1, 1e-8]}, [1.0, 2.0, 0.5]),
    )


def test_what_is_saved_is_loaded(comparison, tmp_path):
    path = tmp_path / "comparison.json"
    comparison.save(path)
    assert Comparison.load(path) == comparison
    assert path.read_text(encoding="utf-8").startswith('{\n "answer": "是",\n "build": ')


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


def test_an_older_file_without_the_newer_fields_is_read(comparison, tmp_path):
    path = tmp_path / "comparison.json"
    comparison.save(path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    older = {name: value for name, value in whole.items() if name not in ("use", "build", "items")}
    older["tasks"] = [{name: value for name, value in task.items() if name != "unit"} for task in whole["tasks"]]
    path.write_text(json.dumps(older), encoding="utf-8")
    found = Comparison.load(path)
    assert (found.items, found.use, found.answer) == (None, "", "是")


@given(st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=9))
def test_what_each_item_gave_is_kept_as_precisely_as_it_was(values):
    """Cosines are float32: the fewest digits that say the same."""
    items = Items.of(bootstrap.mean({"a": values}), "d")
    assert items.values["a"] == [float(str(np.float32(value))) for value in values]
    assert np.array_equal(np.float32(items.values["a"]), np.float32(values))
    assert items.statistic().values() == pytest.approx(np.mean(values), abs=1e-7)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0312, "0.031"),
        (0.98, "0.98"),
        (0.996, "1.0"),
        (2.25, "2.2"),
        (8.84, "8.8"),
        (376.0, "380"),
        (11982, "12,000"),
    ],
)
def test_times_have_two_digits(value, shown):
    assert measured(value) == shown


def test_more_than_three_names_are_a_count():
    assert listed(["a", "b", "c"], "recipes") == "a; b; c"
    assert listed("abcd", "recipes") == "4 recipes"
