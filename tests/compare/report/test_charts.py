from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from st_reba.compare.report.charts import cost_figure, scores_figure
from st_reba.compare.results import Comparison, Result
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.drawing import BLUE, GREY, ORANGE, PALE, drawing_style
from st_reba.evaluation.tasks import Measure
from st_reba.recipes import Control


@pytest.fixture(autouse=True)
def _style():
    with drawing_style():
        yield


TASK = Measure("A", "accuracy, %", chance=0.25)


def result(recipe: str, value: float, cost: float | None = 1.0, tied: bool = False, control: bool = False) -> Result:
    return Result(recipe, "mean", control, {"A": Estimate(value, value - 0.1, value + 0.1, tied)}, cost=cost)


RESULTS = [
    result("Classical", 0.5, 1.0, tied=True),
    result("Echo-2", 0.7, 2.0, tied=True),
    result("RT-2", 0.3, 1.5),
    result("Bag of input embeddings", 0.2, 0.1, control=True),
    result("Random weights, Classical", 0.1, 1.0, control=True),
]


def comparison(results=RESULTS, task: Measure = TASK) -> Comparison:
    return Comparison("a model", "texts", [task], list(results))


def key(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_bars_are_the_scores_in_the_order_given():
    figure = scores_figure(comparison(), TASK, RESULTS)
    bars = figure.axes[0].patches
    np.testing.assert_allclose([bar.get_width() for bar in bars], [50, 70, 30, 20, 10])
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [BLUE, ORANGE, PALE, GREY, GREY]
    assert texts(figure) == [row.name for row in RESULTS]
    low, high = figure.axes[0].collections[0].get_segments()[1]
    np.testing.assert_allclose([low, high], [[60, 1], [80, 1]])


def test_bars_stand_beside_chance_and_the_best_control():
    figure = scores_figure(comparison(), TASK, RESULTS)
    assert key(figure) == ["best", "cannot be told from the best", "worse", "control", "chance", "best control"]
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [0, 25.0, 20.0]


def test_a_task_without_numbers_has_names_only():
    nan = float("nan")
    rows = [Result("RT-2", "last", False, {}), Result("Echo-2", "last", False, {"A": Estimate(nan, nan, nan)})]
    figure = scores_figure(comparison(rows, dataclasses.replace(TASK, chance=None)), TASK, rows)
    assert texts(figure) == ["RT-2, last", "Echo-2, last"]
    assert list(figure.axes[0].patches) == []


def untrained(recipe: Result, value: float) -> list[Result]:
    """A recipe, and the same on random weights."""
    control = result(f"Random weights, {recipe.recipe}", value, control=True)
    return [dataclasses.replace(recipe, controls=(Control("random", control.name, "itself"),)), control]


def test_recipes_are_points_and_controls_are_levels():
    bags = [
        result("Bag of input embeddings, whitened", 0.25, 0.1, control=True),
        result("tf-idf", 0.22, None, control=True),
    ]
    found = comparison([*RESULTS[:1], *untrained(RESULTS[1], 0.1), RESULTS[2], RESULTS[3], *bags])
    figure = cost_figure(found)
    # Of the two bags the stronger one.
    assert texts(figure) == [
        "Random weights, Echo-2, mean",
        "tf-idf, mean",
        "Bag of input embeddings,\nwhitened, mean",
        "RT-2, mean",
        "Classical, mean",
        "Echo-2, mean",
    ]
    levels = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert sorted(levels) == [10.0, 22.0, 25.0]
    points = [line.get_xydata()[0] for line in figure.axes[0].lines if line.get_marker() != "None"]
    np.testing.assert_allclose(sorted(map(tuple, points)), [(1, 50), (1.5, 30), (2, 70)])
    assert key(figure) == ["best", "cannot be told from the best", "worse", "Pareto front", "controls, to be beaten"]
    assert [text.get_fontweight() for text in figure.axes[0].texts] == ["normal"] * 5 + ["bold"]


def test_what_is_to_be_used_stands_out():
    figure = cost_figure(dataclasses.replace(comparison(), use="Classical, mean"))
    assert [text.get_text() for text in figure.axes[0].texts if text.get_fontweight() == "bold"] == ["Classical, mean"]
    assert key(figure)[0] == "to use"


def test_names_are_few_and_none_covers_another_or_leaves_the_figure():
    many = [result(f"{name}, with a filter of a long name", 0.71 + place / 1000, 3.0 + place, tied=True)
            for place, name in enumerate(f"Echo-{number}" for number in range(2, 30))]  # fmt: skip
    figure = cost_figure(comparison([*RESULTS, *many]))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    # An annotation's own extent has its line in it.
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) == 10
    assert "Echo-29, with a filter of a long name" in axes.texts[-1].get_text().replace("\n", " ")
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.x0 > axes.get_window_extent().x1 and box.x1 <= figure.bbox.x1 + 1 for box in boxes)
    assert axes.get_window_extent().width > 0.3 * figure.bbox.width


@pytest.mark.parametrize(("dearest", "scale"), [(3.0, "linear"), (20.0, "log")])
def test_costs_far_apart_are_on_a_logarithmic_scale(dearest, scale):
    figure = cost_figure(comparison([*RESULTS, result("Echo-9", 0.4, dearest)]))
    axes = figure.axes[0]
    assert axes.get_xscale() == scale
    low, high = axes.get_xlim()
    assert low < 1.0
    assert high > dearest


def test_what_was_not_timed_is_not_in_the_plane():
    figure = cost_figure(comparison([*RESULTS[:1], result("RT-2", 0.3, None, tied=True)]))
    assert texts(figure) == ["Classical, mean"]


def test_all_at_one_cost():
    assert cost_figure(comparison(RESULTS[:1])).axes[0].get_xlim() == (0.5, 1.5)


@pytest.mark.parametrize("name", ["$x_{", "模型", "a\nb\x07", "$a$ & <b>"])
def test_names_are_shown_as_they_are(name):
    figure = scores_figure(comparison(), dataclasses.replace(TASK, name="A", metric=name), RESULTS)
    figure.draw_without_rendering()
    assert " ".join(name.replace("\x07", " ").split()) in [text.get_text() for text in figure.findobj(Text)]


def test_long_names_leave_room_for_the_bars():
    rows = [Result("a" * 500, "b" * 500, False, {"A": Estimate(0.5, 0.4, 0.6)}, cost=1.0)]
    task = dataclasses.replace(TASK, metric="c" * 500)
    for figure in (scores_figure(comparison(rows, task), task, rows), cost_figure(comparison(rows, task))):
        figure.draw_without_rendering()
        assert figure.axes[0].get_window_extent().width > 0.15 * figure.bbox.width
