from __future__ import annotations

import math

from st_reba.compare.ranking import best_of, pareto_front, rank
from st_reba.compare.results import Result, Task
from st_reba.evaluation.bootstrap import Estimate

UP = Task("t", "accuracy")
DOWN = Task("t", "distance", greater_is_better=False)


def result(name: str, value: float | None, cost: float | None = None, control: bool = False) -> Result:
    scores = {} if value is None else {"t": Estimate(value, math.nan, math.nan)}
    return Result(name, "mean", control, scores, cost=cost)


def test_the_best_of_either_kind():
    results = [result("a", 0.2), result("b", math.nan), result("c", 0.5), result("d", 0.5), result("e", None)]
    results += [result("f", 0.9, control=True)]
    assert best_of(results, UP).recipe == "c"
    assert best_of(results, DOWN).recipe == "a"
    assert best_of(results, UP, control=True).recipe == "f"
    assert best_of(results[:2], UP, control=True) is None
    assert [row.recipe for row in sorted(results, key=lambda row: rank(row, UP))] == ["f", "c", "d", "a", "b", "e"]


def test_the_front_has_what_nothing_cheaper_equals():
    results = [result("dear", 0.9, 4), result("cheap", 0.3, 1), result("same", 0.3, 2), result("worse", 0.2, 3)]
    results += [result("middle", 0.5, 2), result("untimed", 1.0), result("nothing", math.nan, 0.1)]
    assert [row.recipe for row in pareto_front(results, UP)] == ["cheap", "middle", "dear"]
    assert [row.recipe for row in pareto_front(results, DOWN)] == ["cheap", "worse"]
