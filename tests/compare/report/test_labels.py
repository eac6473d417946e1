from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from st_reba.compare.report.labels import Label, place

from ...conftest import examples

POINTS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8)


def placed(points):
    """The labels' boxes and the points, both in pixels, and the axes' box."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlim(-0.5, 1.5)
    axes.set_ylim(-0.1, 1.1)
    place(axes, [Label(f"Recipe {i}", *point) for i, point in enumerate(points)], points, line="grey", ground="white")
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    return boxes, axes.transData.transform(points), axes.get_window_extent()


@given(POINTS)
@settings(max_examples=examples(15), deadline=None)
def test_labels_cover_neither_each_other_nor_a_point(points):
    boxes, pixels, room = placed(points)
    for first, second in itertools.combinations(boxes.values(), 2):
        assert not first.padded(-0.01).overlaps(second.padded(-0.01))
    for box in boxes.values():
        assert not any(box.contains(*point) for point in pixels)
        assert room.padded(0.01).contains(*box.p0)
        assert room.padded(0.01).contains(*box.p1)


def test_a_lone_point_has_its_label_right_beside_it():
    boxes, pixels, _ = placed([(0.5, 0.5)])
    box = boxes["Recipe 0"]
    assert 0 < box.x0 - pixels[0][0] < 15
    np.testing.assert_allclose((box.y0 + box.y1) / 2, pixels[0][1], atol=1)


def test_the_first_has_its_way_and_what_finds_no_room_is_left_out():
    boxes, _, _ = placed([(0.5, 0.5 + 1e-4 * index) for index in range(60)])
    assert 0 < len(boxes) < 60
