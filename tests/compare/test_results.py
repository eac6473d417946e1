"""What a comparison found: saved and read, as a table, and beside an older one."""

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
from st_reba.compare.results import Comparison, Result, SavedItems, best_of, listed, rank, rows
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure
from st_reba_cli.show import show

from . import samples

NAN = math.nan


@pytest.fixture
def comparison():
    # One with a control of its own.
    *others, first = samples.demo().results
    first = dataclasses.replace(first, same_as=("ReBA-1", "Bidirectional"), cost=None)
    items = SavedItems("spearman", "digest", {"Echo-2, mean": [0.125, 0.1, 1e-8]}, [1.0, 2.0, 0.5])
    return dataclasses.replace(samples.demo(), results=[first, *others[:2]], answer="是", items=items)


@pytest.fixture
def saved(comparison, tmp_path):
    """The path of a saved comparison, and what stands there."""
    comparison.save(tmp_path / "comparison.json")
    text = (tmp_path / "comparison.json").read_text(encoding="utf-8")
    return tmp_path / "comparison.json", text, json.loads(text)


def test_what_is_saved_is_loaded(comparison, saved):
    assert Comparison.load(saved[0]) == comparison


def test_what_is_no_number_is_null(tmp_path):
    path = tmp_path / "comparison.json"
    scores = {"A": Estimate(0.5, NAN, NAN, tied=True)}
    Comparison("m", "d", [Measure("A", "accuracy")], [Result("Echo-2", "mean", False, scores)]).save(path)
    text = path.read_text(encoding="utf-8")
    assert "NaN" not in text
    found = Comparison.load(path).results[0].scores["A"]
    assert (found.value, found.tied) == (0.5, True)
    assert math.isnan(found.low + found.high)


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
    return json.dumps(found)


WRONG: list[object] = [None, -1, "x", True, [], [None], {"x": None}]


def test_whatever_a_file_holds_is_shown_or_refused_by_its_key(comparison, saved):
    """Each key takes a value of each wrong kind: one sentence, or a comparison that can be shown and held against."""
    path, _, whole = saved
    console, refused, read = Console(file=io.StringIO(), width=120), 0, 0
    for place, _ in list(places(whole))[1:]:
        named = ".".join(map(str, place))
        for value in WRONG:
            path.write_text(changed(whole, place, value), encoding="utf-8")
            try:
                found = Comparison.load(path)
            except ValueError as error:
                said = str(error)
                # What does not go together has no key of its own.
                assert f"({named}" in said or (place[0] == "items" and "(items: " in said), said
                assert said.startswith(f"{path} is no comparison that st_reba"), said
                assert said.endswith("or run the comparison again.")
                assert "\n" not in said
                refused += 1
                continue
            read += 1
            show(found, to=console)
            with contextlib.suppress(ValueError):
                side_by_side(found, comparison)
    assert refused > 300
    assert 30 < read < refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "recursion limit exceeded"),
        ("[]", "Input should be an object"),
    ],
)
def test_what_is_no_comparison(text, message, tmp_path):
    path = tmp_path / "other.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"(?i)other.json is no comparison that st_reba [^ ]+ reads \(.*{message}"):
        Comparison.load(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("items", "values"), {"a": [1], "b": [1, 2]}, "items: every result needs as many values, one or more"),
        (("temperature",), 1, "temperature: this version knows no such field"),
    ],
)
def test_the_key_is_named(place, value, message, saved):
    path, _, whole = saved
    path.write_text(changed(whole, place, value), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"reads ({message}")):
        Comparison.load(path)


def test_an_older_file_without_the_newer_fields_is_read(saved):
    path, _, whole = saved
    older = {name: value for name, value in whole.items() if name not in ("use", "build", "items", "prompts")}
    older["tasks"] = [{name: value for name, value in task.items() if name != "unit"} for task in whole["tasks"]]
    path.write_text(json.dumps(older), encoding="utf-8")
    found = Comparison.load(path)
    assert (found.items, found.use, found.answer) == (None, "", "是")


@given(st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=9))
def test_what_each_item_gave_is_kept_as_precisely_as_it_was(values):
    """Cosines are float32: the fewest digits that say the same."""
    items = SavedItems.of(bootstrap.mean({"a": values}), "d")
    assert items.values["a"] == [float(str(np.float32(value))) for value in values]
    assert items.items().scores == pytest.approx(np.mean(values), abs=1e-7)


def test_the_best_of_either_kind_and_the_rows_of_a_table():
    up = Measure("t", "accuracy")

    def made(name: str, value: float | None, tied: bool = False, control: bool = False) -> Result:
        return Result(name, "mean", control, {} if value is None else {"t": Estimate(value, NAN, NAN, tied)})

    results = [made("a", 0.2), made("b", NAN, True), made("c", 0.5, True), made("d", 0.5, True), made("e", None)]
    results += [made("g", 0.4, True), made("f", 0.9, True, control=True)]
    assert best_of(results, up).recipe == "c"
    assert best_of(results, up, control=True).recipe == "f"
    assert best_of(results[:2], up, control=True) is None
    assert [row.recipe for row in sorted(results, key=lambda row: rank(row, up))] == [*"fcdgabe"]
    assert [row.result.recipe for row in rows(Comparison("m", "d", [up], results))] == [*"cdgabef"]
    assert [listed(names, "recipes") for names in ("abc", "abcd")] == ["a; b; c", "4 recipes"]


# Beside an older one

TASK = Measure("STS", "accuracy x 100", unit="labelled pairs")
HARD = np.random.default_rng(9).random(400)


def shares(right: dict[str, float], seed: int = 0, data: str = "the data") -> Comparison:
    """Recipes that get such shares of the items right."""
    noise = 0.05 * np.random.default_rng(seed).standard_normal(400)
    values = {f"{name}, mean": (HARD + noise < share) * 1.0 for name, share in right.items()}
    found = bootstrap.estimate(bootstrap.mean(values))
    results = [Result(name, "mean", False, {"STS": found[f"{name}, mean"]}) for name in right]
    items = SavedItems.of(bootstrap.mean(values), data)
    return Comparison("model", "pairs", [TASK], results, items=items, use="A, mean")


def test_paired_differences_see_what_others_do_not():
    old, new = shares({"A": 0.5, "B": 0.6}, 1), shares({"A": 0.55, "B": 0.6, "C": 0.9}, 2)
    paired = side_by_side(new, old)
    assert paired.paired
    assert [change.name for change in paired.changes] == ["A, mean", "B, mean"]
    first, second = (change.difference for change in paired.changes)
    assert 0 < first.low < first.value < first.high
    assert (first.tied, second.tied) == (False, True)
    assert paired.says[0].startswith("1 of 2 results changed beyond the interval, most of all A, mean by +")
    same = "The intervals are paired: both comparisons are of the same labelled pairs."
    assert paired.says[1:] == [same, "To use: A, mean, as before."]
    apart = side_by_side(new, dataclasses.replace(old, items=dataclasses.replace(old.items, data="others"), use=""))
    # The same difference, much less sure: the items are no longer the same.
    assert apart.changes[0].difference.tied
    assert apart.says[0].startswith("Nothing changed beyond the interval, of 2 results; most of all A, mean by +")
    assert apart.says[1].startswith("The intervals are not paired: the labelled pairs are others")
    assert apart.says[2] == "To use: A, mean; before: none."


def test_intervals_of_two_samples():
    """The halves of both intervals, each on its side, add up by their squares."""
    old, new = (dataclasses.replace(shares({"A": share}), items=None) for share in (0.5, 0.6))
    (change,) = side_by_side(new, old).changes
    low = math.hypot(change.new.value - change.new.low, change.old.high - change.old.value)
    assert change.difference.value - change.difference.low == pytest.approx(low)
    # Near that of two means that have nothing to do with each other.
    deviation = math.sqrt(2 * 0.25 / 400)
    assert change.difference.high - change.difference.low == pytest.approx(2 * 1.96 * deviation, rel=0.1)
    assert "what each item gave was not kept" in side_by_side(new, old).says[1]
    # Where there is no interval nothing is told.
    results = [Result("A", "mean", False, {"STS": Estimate(0.9, NAN, NAN)})]
    assert side_by_side(dataclasses.replace(new, results=results), old).changes[0].difference.tied


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (shares({"Z": 0.5}), "have no recipe in common: the old one has Z, mean."),
        (
            dataclasses.replace(shares({"A": 0.5}), tasks=[Measure("NLI", "accuracy x 100")]),
            r"by STS \(accuracy x 100\), the old one by NLI \(accuracy x 100\): compare on the same kind of data",
        ),
    ],
)
def test_what_cannot_be_held_against_each_other(old, message):
    with pytest.raises(ValueError, match=message):
        side_by_side(shares({"A": 0.5}), old)
