from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from st_reba.compare.against import side_by_side
from st_reba.compare.results import Comparison, Result, SavedItems, best_of, listed, measured, pareto_front, rank
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure
from st_reba_cli.show import show

from .report import samples


@pytest.fixture
def comparison():
    # One with a control of its own.
    *others, first = samples.demo().results
    first = dataclasses.replace(first, same_as=("ReBA-1", "Bidirectional"), cost=None)
    return dataclasses.replace(
        samples.demo(),
        results=[first, *others],
        skipped=[("RT-2, last", "no cache")],
        answer="是",
        items=SavedItems("spearman", "digest", {"Echo-2, mean": [0.125, 0.1, 1e-8]}, [1.0, 2.0, 0.5]),
    )


def test_what_is_saved_is_loaded(comparison, tmp_path):
    path = tmp_path / "comparison.json"
    comparison.save(path)
    assert Comparison.load(path) == comparison
    assert path.read_text(encoding="utf-8").startswith('{\n "answer": "是",\n "build": ')


def test_what_is_no_number_is_null(tmp_path):
    path = tmp_path / "comparison.json"
    scores = {"A": Estimate(0.5, math.nan, math.nan, tied=True)}
    Comparison("m", "d", [Measure("A", "accuracy")], [Result("Echo-2", "mean", False, scores)]).save(path)
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


def places(value, path=()):
    """Every key of a file and the first of every list, with what stands there."""
    yield path, value
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def changed(whole, path, value):
    found = json.loads(json.dumps(whole))
    parent = found
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return found


WRONG: list[object] = [None, -1, 0.5, "x", True, [], {}, [None], [[]], {"x": None}]
#: Where there need not be a number or an object.
NULL = {"value", "low", "high", "chance", "sentences_per_second", "cost", "items"}


def kind(value):
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


def test_whatever_a_file_holds_is_shown_or_refused_by_its_key(comparison, tmp_path):
    """Each key takes a value of each wrong kind: one sentence, or a comparison that can be shown and held against."""
    path, console = tmp_path / "comparison.json", Console(file=io.StringIO(), width=120)
    comparison = dataclasses.replace(comparison, results=comparison.results[:3])
    comparison.save(path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    tried = 0
    for place, old in list(places(whole)):
        for value in WRONG if place else ():
            text = json.dumps(changed(whole, place, value))
            path.write_text(text, encoding="utf-8")
            tried += 1
            named = ".".join(map(str, place))
            try:
                found = Comparison.load(path)
            except ValueError as error:
                said = str(error)
                assert said.startswith(f"{path} is no comparison that st_reba"), said
                # What does not go together has no key of its own.
                assert f"({named}" in said or (place[0] == "items" and "(items: " in said), said
                assert said.endswith("or run the comparison again.")
                assert "\n" not in said
                continue
            null = place[-1] in NULL or place[:2] == ("items", "values")
            assert kind(value) == ("number" if old is None else kind(old)) or (value is None and null)
            show(found, to=console)
            with contextlib.suppress(ValueError):
                side_by_side(found, comparison)
    assert tried > 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "recursion limit exceeded"),
        ('{"a":' * 100_000, "recursion limit exceeded"),
        ('{"model": "\\ud800"}', "unexpected end of hex escape"),
        (b"\xff\xfe", "expected value"),
        ("-1", "Input should be an object"),
        ("", "EOF while parsing"),
    ],
)
def test_what_is_no_json(text, message, tmp_path):
    path = tmp_path / "other.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"other.json is no comparison that st_reba [^ ]+ reads \(.*{message}"):
        Comparison.load(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("settings",), -1, "settings: input should be "),
        (("tasks", 0, "scale"), [], "tasks.0.scale: input should be a valid number"),
        (("tasks", 0, "scale"), 0, "tasks.0.scale: input should be greater than 0"),
        (("tasks",), [], "tasks: list should have at least 1 item"),
        (("results", 0, "scores", "STS"), {}, "results.0.scores.STS.value: field required"),
        (("results", 0, "controls", 0, "kind"), "x", "results.0.controls.0.kind: input should be 'tf-idf', 'bag'"),
        (("items", "kind"), "difference", "items.kind: input should be 'mean', 'spearman' or 'average_precision'"),
        (("items", "labels"), [1.0], "items: there must be as many labels as values of a result"),
        (("items", "values"), {"a": [1], "b": [1, 2]}, "items: every result needs as many values, one or more"),
        (("items", "kind"), "mean", "items: a mean has no labels"),
        (("temperature",), 1, "temperature: this version knows no such field"),
    ],
)
def test_the_key_is_named(place, value, message, comparison, tmp_path):
    path = tmp_path / "comparison.json"
    comparison.save(path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(changed(whole, place, value)), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"reads ({message}")):
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
    items = SavedItems.of(bootstrap.mean({"a": values}), "d")
    assert items.values["a"] == [float(str(np.float32(value))) for value in values]
    assert np.array_equal(np.float32(items.values["a"]), np.float32(values))
    assert items.items().scores == pytest.approx(np.mean(values), abs=1e-7)


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


UP = Measure("t", "accuracy")
DOWN = Measure("t", "distance", greater_is_better=False)


def made(name: str, value: float | None, cost: float | None = None, control: bool = False) -> Result:
    scores = {} if value is None else {"t": Estimate(value, math.nan, math.nan)}
    return Result(name, "mean", control, scores, cost=cost)


def test_the_best_of_either_kind():
    results = [made("a", 0.2), made("b", math.nan), made("c", 0.5), made("d", 0.5), made("e", None)]
    results += [made("f", 0.9, control=True)]
    assert best_of(results, UP).recipe == "c"
    assert best_of(results, DOWN).recipe == "a"
    assert best_of(results, UP, control=True).recipe == "f"
    assert best_of(results[:2], UP, control=True) is None
    assert [row.recipe for row in sorted(results, key=lambda row: rank(row, UP))] == ["f", "c", "d", "a", "b", "e"]


def test_the_front_has_what_nothing_cheaper_equals():
    results = [made("dear", 0.9, 4), made("cheap", 0.3, 1), made("same", 0.3, 2), made("worse", 0.2, 3)]
    results += [made("middle", 0.5, 2), made("untimed", 1.0), made("nothing", math.nan, 0.1)]
    assert [row.recipe for row in pareto_front(results, UP)] == ["cheap", "middle", "dear"]
    assert [row.recipe for row in pareto_front(results, DOWN)] == ["cheap", "worse"]
