from __future__ import annotations

import base64
import dataclasses
import itertools
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.text import Text

from st_reba.compare import report
from st_reba.compare.pictures import cost_figure, drawing_style, pareto_front
from st_reba.compare.report import write_report
from st_reba.compare.results import Comparison, Result
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure
from st_reba.recipes import Control

from . import samples

VOID = {"meta", "link", "br", "hr", "img"}


class Page(HTMLParser):
    """A page's elements as (tag, attributes, text), in order of their start; refuses tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, _, text in self.open:
            text.append(data)

    def all(self, tag: str, **wanted: str) -> list[str]:
        """The texts of the elements of a name, those that have all the given attributes."""
        wanted = {name.rstrip("_"): value for name, value in wanted.items()}
        found = [
            text for name, attributes, text in self.elements if name == tag and wanted.items() <= attributes.items()
        ]
        return [" ".join("".join(text).split()) for text in found]

    def rows(self) -> list[list[str]]:
        """The cells' texts of each of the table's rows."""
        rows: list[list[str]] = []
        for tag, _, text in self.elements:
            if tag == "tr":
                rows.append([])
            elif tag in ("th", "td"):
                rows[-1].append(" ".join("".join(text).split()))
        return rows


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's comparison, the directory of its report, and the page."""
    directory = tmp_path_factory.mktemp("demo") / "deep" / "out"
    path = write_report(samples.demo(), directory)
    assert path == directory / "report.html"
    return samples.demo(), directory, Page(path.read_text(encoding="utf-8"))


def tiny(**changes) -> Comparison:
    """Two recipes and a control on two tasks."""
    tasks = [Measure("A", "accuracy, %", chance=0.25, note="Of two."), Measure("B", "points", 1.0)]
    classical = {"A": Estimate(0.5, 0.4, 0.6, True), "B": Estimate(3.0, 2.5, 3.5)}
    echo = {"A": Estimate(0.7, 0.6, 0.8, True, 0.68), "B": Estimate(4.0, 3.5, 4.5)}
    bag = {"A": Estimate(0.2, 0.1, 0.3), "B": Estimate(1.0, 0.5, 1.5)}
    results = [
        Result("Classical", "mean", False, classical, 10.0, 1.0, same_as=("ReBA-1", "Bidirectional")),
        Result("Echo-2", "mean", False, echo, 5.0, 2.0, says="Two copies.", read_at="@7",
               chosen={"as it is": 4, "@7": 6}),
        Result("Bag of input embeddings", "mean", True, bag),
    ]  # fmt: skip
    return dataclasses.replace(Comparison("a model", "texts", tasks, results), **changes)


def page_of(comparison: Comparison, tmp_path) -> tuple[str, Page]:
    text = write_report(comparison, tmp_path / "out").read_text(encoding="utf-8")
    return text, Page(text)


def test_what_the_page_has_around_its_table(demo):
    comparison, _, page = demo
    assert page.all("p", class_="first") == [comparison.answer]
    assert set(comparison.verdict) <= set(page.all("li"))
    text = page.all("main")[0]
    for task in comparison.tasks:
        assert f"{task.note} {task.metric[:1].upper()}{task.metric[1:]}, higher is better" in text
    for name, value in (comparison.settings | comparison.versions).items():
        assert f"{name}{value}" in text
    assert page.rows()[-1] == list(comparison.skipped[0])
    assert page.all("time", datetime="2026-11-20") == ["2026-11-20"]


def test_the_page_loads_nothing_and_can_be_read_aloud(demo):
    _, directory, page = demo
    text = (directory / "report.html").read_text(encoding="utf-8")
    assert "//" not in re.sub(r"data:image/svg\+xml;base64,[\w+/=]+", "", text)
    assert not {tag for tag, _, _ in page.elements} & {"script", "iframe", "object", "embed"}
    links = [attributes["href"] for tag, attributes, _ in page.elements if tag in ("a", "link")]
    assert links.pop(0) == "data:,"
    assert sorted(links) == sorted(path.name for path in directory.iterdir() if path.name != "report.html")
    assert {attributes["scope"] for tag, attributes, _ in page.elements if tag == "th"} == {"col", "row", "rowgroup"}
    (picture,) = (attributes for tag, attributes, _ in page.elements if tag == "img")
    assert len(picture["alt"]) > 40
    drawn = base64.b64decode(picture["src"].partition(",")[2]).decode()
    assert ElementTree.fromstring(drawn).findall(".//{http://www.w3.org/2000/svg}text")
    assert "Echo-2, bidirectional," in drawn


def test_the_best_of_each_column_is_bold_and_ties_are_marked(tmp_path, undrawn):
    untrained = Result("Random weights, Echo-2", "mean", True, {"A": Estimate(0.15, 0.1, 0.3)})
    classical, echo, bag = tiny().results
    echo = dataclasses.replace(echo, controls=(Control("random", untrained.name, "itself"),))
    given = tiny(results=[classical, echo, bag, untrained], build="st-reba build", command="st-reba compare")
    text, page = page_of(given, tmp_path)
    rows = page.rows()
    tied = "50.0≈ cannot be told from the best [40.0, 60.0]"
    best = "70.0 best corrected 68.0 [60.0, 80.0]"
    assert rows[1] == ["Echo-2 mean", best, "15.0", "4.000 best [3.500, 4.500]", "@7", "2.0×", "5.0"]
    assert rows[2] == ["Classical = ReBA-1 = Bidirectional mean", tied, "", "3.000 [2.500, 3.500]", "", "1.0×", "10"]
    assert rows[4] == ["Bag of input embeddings mean", "20.0 [10.0, 30.0]", "", "1.000 [0.500, 1.500]", "", "", ""]
    assert page.all("strong") == ["bold", "70.0", "4.000"]
    # The forest plot goes from 0 to 80, and is shaded up to the control.
    bar, dot = r'--low: ([\d.]+)%; --high: ([\d.]+)%"></i>', r'<i class="dot" style="--value: ([\d.]+)%'
    assert re.findall(rf'{bar}(?:<i class="tick"[^>]*></i>)?{dot}', text) == [
        ("75.0", "100.0", "87.5"), ("50.0", "75.0", "62.5"), ("12.5", "37.5", "25.0"), ("12.5", "37.5", "18.8"),
    ]  # fmt: skip
    assert text.count('class="tick" style="--value: 85.0%"') == 1
    assert text.count('class="level" style="--value: 25.0%"') == 4
    assert [tick for tick in page.all("i") if tick] == ["0", "20", "40", "60", "80"]
    assert {"Two copies.", "as it is: 4 of 10; @7: 6 of 10"} <= set(page.all("dd"))
    assert page.all("code") == ["st-reba build", "st-reba compare"]
    # What is not known is empty in the CSV.
    lines = (tmp_path / "out" / "results.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("recipe,pooling,control,corrected,A,A low,A high,A tied,A random,B,")
    assert lines[1].startswith("Echo-2,mean,False,0.68,0.7,0.6,0.8,True,0.15,4.0,")
    assert lines[-1] == "Bag of input embeddings,mean,True,,0.2,0.1,0.3,False,,1.0,0.5,1.5,False,,,,,"


def test_whatever_text_there_is_does_no_harm(tmp_path):
    evil = '<script>alert("1")</script>$x_{$ 模型 \x07 &amp;'
    results = [
        Result(f"{evil} {index}", evil, index == 2, {evil: Estimate(0.1 * index, 0.0, 0.3, True)}, 1.0, 1.0)
        for index in range(3)
    ]
    told = [evil], [(evil, evil)], [3, 4], {evil: evil}, {evil: evil}, evil, evil
    text, page = page_of(Comparison(evil, evil, [Measure(evil, evil, note=evil)], results, *told), tmp_path)
    assert "<script" not in text
    assert page.all("h1") == [" ".join(f"Which recipe for {evil}?".split())]
    assert page.all("code")[0].startswith('<script>alert("1")</script>$x_{$ 模型')
    (address,) = (attributes["src"] for tag, attributes, _ in page.elements if tag == "img")
    assert "$x_{$ 模型 &amp;amp;" in base64.b64decode(address.partition(",")[2]).decode()


def test_without_intervals(tmp_path, undrawn):
    own = [Result(each.recipe, each.pooling, each.control, {"A": Estimate(0.4, NAN, NAN)}) for each in tiny().results]
    text, page = page_of(tiny(tasks=tiny().tasks[:1], results=own), tmp_path)
    assert 'class="bar"' not in text
    assert page.rows()[1][1] == "40.0 best"
    assert "How often each setting was chosen" not in text
    assert not (tmp_path / "out" / "cost.png").exists()


def test_a_long_page_folds(tmp_path, monkeypatch, undrawn):
    monkeypatch.setattr(report, "_OPEN_ROWS", 1)
    _, page = page_of(tiny(), tmp_path)
    assert page.all("summary")[0] == "1 more recipe"


NAN = float("nan")
NO_NUMBER = Result("ReBA-2", "mean", False, {"A": Estimate(NAN, NAN, NAN)}, 5.0, 2.0)


@pytest.mark.parametrize("results", [[], [NO_NUMBER, *tiny().results[2:]]])
def test_a_comparison_that_decides_nothing_is_written_all_the_same(results, tmp_path):
    """Where all texts are alike no recipe has a number."""
    page = write_report(tiny(results=results), tmp_path / "out").read_text(encoding="utf-8")
    assert 'class="leader"' not in page
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "results.csv", "comparison.json"}


def test_what_is_refused(tmp_path, monkeypatch):
    """And a report that fails leaves nothing."""
    for missing, message in (("matplotlib.figure", "Drawing needs matplotlib"), ("jinja2", "A report needs jinja2")):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, missing, None)
            with pytest.raises(ImportError, match=message):
                write_report(tiny(), tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(report, "_page", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_report(tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert write_report(tiny(), tmp_path / "out", page=False) == tmp_path / "out" / "results.csv"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.csv", "comparison.json"}
    with pytest.raises(ValueError, match="exists and is not an empty directory: choose another --report, or remove it"):
        write_report(tiny(), tmp_path / "out", "--report")


# The figure

TASK = Measure("A", "accuracy, %", chance=0.25)


def result(recipe: str, value: float, cost: float | None = 1.0, tied: bool = False, control: bool = False) -> Result:
    return Result(recipe, "mean", control, {"A": Estimate(value, value - 0.1, value + 0.1, tied)}, cost=cost)


RESULTS = [
    result("Classical", 0.5, 1.0, tied=True),
    result("Echo-2", 0.7, 2.0, tied=True),
    result("RT-2", 0.3, 1.5),
    result("Bag of input embeddings", 0.2, 0.1, control=True),
]


def figure_of(results, **changes):
    with drawing_style():
        figure = cost_figure(dataclasses.replace(Comparison("a model", "texts", [TASK], list(results)), **changes))
        figure.draw_without_rendering()
    return figure


def test_recipes_are_points_and_controls_are_levels():
    untrained = result("Random weights, Echo-2", 0.1, control=True)
    echo = dataclasses.replace(RESULTS[1], controls=(Control("random", untrained.name, "itself"),))
    more = [result("Bag, whitened", 0.25, 0.1, control=True), result("tf-idf", 0.22, None, control=True)]
    figure = figure_of([RESULTS[0], echo, untrained, *RESULTS[2:], *more, result("Not timed", 0.4, None)])
    # Of the two bags the stronger one.
    controls = ["Bag, whitened, mean", "tf-idf, mean", "Random weights, Echo-2, mean"]
    named = [text.get_text() for text in figure.axes[0].texts]
    assert named == ["Echo-2, mean", "Classical, mean", "RT-2, mean", *controls]
    lines = figure.axes[0].lines
    assert sorted(line.get_ydata()[0] for line in lines if line.get_linestyle() == "--") == [10.0, 22.0, 25.0]
    points = [tuple(line.get_xydata()[0]) for line in lines if line.get_marker() not in ("None", "_")]
    np.testing.assert_allclose(sorted(points), [(1, 50), (1.5, 30), (2, 70)])
    key = [text.get_text() for text in figure.legends[0].get_texts()]
    assert key == ["best", "cannot be told from the best", "worse", "Pareto front", "controls, to be beaten"]
    assert figure_of([*RESULTS, result("dear", 0.4, 20.0)]).axes[0].get_xscale() == "log"
    used = figure_of(RESULTS[:3], use="Classical, mean")
    assert used.axes[0].get_xscale() == "linear"
    assert [text.get_text() for text in used.axes[0].texts if text.get_fontweight() == "bold"] == ["Classical, mean"]
    assert used.legends[0].get_texts()[0].get_text() == "to use"


def test_a_name_covers_nothing():
    many = [result(f"Echo-{place}, with a filter of a long name", 0.71 + place / 1000, 3.0 + place, tied=True)
            for place in range(2, 30)]  # fmt: skip
    axes = figure_of([*RESULTS, *many, result("a" * 500, 0.9, 40.0)]).axes[0]
    # An annotation's own extent has its line in it. There is no room for most of those that are close to each other.
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert 4 < len(boxes) < 16
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(axes.bbox.contains(*corner) for box in boxes for corner in box.corners())


def test_the_front_has_what_nothing_cheaper_equals():
    results = [result("dear", 0.9, 4), result("cheap", 0.3, 1), result("same", 0.3, 2), result("worse", 0.2, 3)]
    results += [result("middle", 0.5, 2), result("untimed", 1.0, None), result("nothing", NAN, 0.1)]
    assert [each.recipe for each in pareto_front(results, TASK)] == ["cheap", "middle", "dear"]
