from __future__ import annotations

import matplotlib
import pytest

from st_reba.evaluation import drawing
from st_reba.evaluation.drawing import drawable, drawing_style, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\t c\x00d\ud800", "a b c d"),
        ("模型 $x$", "模型 $x$"),
        ("a" * 60, "a" * 60),
        ("a" * 58 + " bc", "a" * 58 + "…"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown


def test_what_no_font_has_becomes_an_ellipsis(monkeypatch):
    monkeypatch.setattr(drawing, "_characters", lambda: frozenset(map(ord, "Echo-2, …")))
    assert drawable("Echo-2, 模型") == "Echo-2, …"
    assert drawable("模Echo型型") == "…Echo…"
    monkeypatch.undo()
    assert drawable("ReBA-2 × 100 − [3.1]") == "ReBA-2 × 100 − [3.1]"


def test_the_style_ends_with_the_block():
    before = dict(matplotlib.rcParams)
    with drawing_style():
        assert matplotlib.rcParams["svg.fonttype"] == "none"
        assert matplotlib.rcParams["font.family"][0] == "DejaVu Sans"
    assert dict(matplotlib.rcParams) == before
