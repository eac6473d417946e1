from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from st_reba.compare import report
from st_reba.compare.report import cost_axis, label_places, layer_axis, levels, score_axis, write_report
from st_reba.compare.results import Comparison, Control, Result
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure

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
        found = [text for name, own, text in self.elements if name == tag and wanted.items() <= own.items()]
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
        Result("Classical", "mean", False, classical, 10.0, 1.0),
        Result("Echo-2", "mean", False, echo, 5.0, 2.0, description="Two copies.", read_at="@7",
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
    assert "//" not in text
    assert not {tag for tag, _, _ in page.elements} & {"iframe", "object", "embed"}
    assert [attributes for tag, attributes, _ in page.elements if tag == "script"] == [{}]
    links = [attributes["href"] for tag, attributes, _ in page.elements if tag in ("a", "link")]
    assert links.pop(0) == "data:,"
    assert sorted(links) == sorted(path.name for path in directory.iterdir() if path.name != "report.html")
    assert {attributes["scope"] for tag, attributes, _ in page.elements if tag == "th"} == {"col", "row", "rowgroup"}
    [picture] = (attributes for _, attributes, _ in page.elements if attributes.get("role") == "img")
    assert "Echo-3, mean reaches 11.1 at 3.8 times the cost of the classical embedding" in picture["aria-label"]
    assert "Echo-2, bidirectional, mean: 2.5, 2.1×" in {attributes.get("title") for _, attributes, _ in page.elements}


def test_the_best_of_each_column_is_bold_and_ties_are_marked(tmp_path):
    untrained = Result("Random weights, Echo-2", "mean", True, {"A": Estimate(0.15, 0.1, 0.3)})
    classical, echo, bag = tiny().results
    echo = dataclasses.replace(echo, controls=(Control("random", untrained.name),))
    given = tiny(results=[classical, echo, bag, untrained], build="st-reba build --out a", command="st-reba compare")
    text, page = page_of(given, tmp_path)
    rows = page.rows()
    tied = "50.0≈ cannot be told from the best [40.0, 60.0]"
    best = "70.0 best corrected 68.0 [60.0, 80.0]"
    assert rows[1] == ["Echo-2 mean", best, "15.0", "4.000 best [3.500, 4.500]", "@7", "2.0×", "5.0"]
    assert rows[2] == ["Classical mean", tied, "", "3.000 [2.500, 3.500]", "", "1.0×", "10"]
    assert rows[4] == ["Bag of input embeddings mean", "20.0 [10.0, 30.0]", "", "1.000 [0.500, 1.500]", "", "", ""]
    assert page.all("strong") == ["bold", "70.0", "4.000"]
    assert page.all("th", **{"aria-sort": "descending"}) == ["A accuracy, %"]
    # The forest plot goes from 0 to 80, and is shaded up to the control.
    bar, dot = r'--low: ([\d.]+)%; --high: ([\d.]+)%"></i>', r'<i class="dot" style="--value: ([\d.]+)%'
    assert re.findall(rf'{bar}(?:<i class="tick"[^>]*></i>)?{dot}', text) == [
        ("75.0", "100.0", "87.5"), ("50.0", "75.0", "62.5"), ("12.5", "37.5", "25.0"), ("12.5", "37.5", "18.8"),
    ]  # fmt: skip
    assert text.count('class="tick" style="--value: 85.0%"') == 1
    assert text.count('class="level" style="--value: 25.0%"') == 4
    assert [tick for tick in page.all("i") if tick] == ["0", "20", "40", "60", "80"]
    assert {"Two copies.", "as it is: 4 of 10; @7: 6 of 10"} <= set(page.all("dd"))
    assert page.all("code") == ["st-reba build --out a", "st-reba compare"]
    # What is not known is empty in the CSV.
    lines = (tmp_path / "out" / "results.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("recipe,pooling,control,corrected,A,A low,A high,A tied,A random,B,")
    assert lines[1].startswith("Echo-2,mean,False,0.68,0.7,0.6,0.8,True,0.15,4.0,")
    assert lines[-1] == "Bag of input embeddings,mean,True,,0.2,0.1,0.3,False,,1.0,0.5,1.5,False,,,,"


def test_whatever_text_there_is_does_no_harm(tmp_path):
    evil = '<script>alert("1")</script>$x_{$ 模型 \x07 &amp;'
    results = [
        Result(f"{evil} {index}", evil, index == 2, {evil: Estimate(0.1 * index, 0.0, 0.3, True)}, 1.0, 1.0)
        for index in range(3)
    ]
    told = [evil], [(evil, evil)], [3, 4], {evil: evil}, {evil: evil}, evil, evil
    text, page = page_of(Comparison(evil, evil, [Measure(evil, evil, note=evil)], results, *told), tmp_path)
    assert text.count("<script") == 1
    assert page.all("h1") == [" ".join(f"Which recipe for {evil}?".split())]
    assert page.all("code")[0].startswith('<script>alert("1")</script>$x_{$ 模型')


def test_without_intervals(tmp_path):
    own = [Result(each.recipe, each.pooling, each.control, {"A": Estimate(0.4, NAN, NAN)}) for each in tiny().results]
    text, page = page_of(tiny(tasks=tiny().tasks[:1], results=own), tmp_path)
    assert 'class="bar"' not in text
    assert page.rows()[1][1] == "40.0 best"
    assert "How often each setting was chosen" not in text
    assert "Score against cost" not in text


def test_a_long_page_folds(tmp_path, monkeypatch):
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
    with monkeypatch.context() as patched:
        patched.setattr(report, "_page", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_report(tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out" / "old").mkdir(parents=True)
    with pytest.raises(ValueError, match="exists and is not an empty directory: choose another --report, or remove it"):
        write_report(tiny(), tmp_path / "out", "--report")


# The pictures


def test_the_axis_of_scores_holds_all_of_them_between_round_ticks():
    ends = {(0.21, 0.78): [20, 80], (-0.2, 0.5): [-20, 60], (0.5, 0.5): [50, 51], (0.113, 0.1131): None}
    for (low, high), ticks in ends.items():
        place, shown = score_axis(tiny().tasks[0], [low, NAN, high])
        values = [value for value, _ in shown]
        assert place(values[0]) == pytest.approx(0)
        assert place(values[-1]) == pytest.approx(100)
        assert 0 <= place(low) <= 100
        if ticks:
            assert [shown[0][1], shown[-1][1]] == [str(tick).replace("-", "−") for tick in ticks]
        assert 2 <= len(shown) <= 8


def test_costs_are_far_apart_on_a_logarithmic_axis():
    place, ticks = cost_axis([0.5, 5])
    assert [name for _, name in ticks] == ["0.5×", "1×", "2×", "5×"]
    assert place(5) - place(0.5) == pytest.approx(place(0.5) - place(0.05))
    assert cost_axis([1.0])[0](1.0) == 50


@pytest.mark.parametrize("values", [[], [50.0], [0.0] * 5, [100.0] * 20, [99.0, 1.0, 50.0, 51.0], [30.0] * 40])
def test_labels_are_apart_and_in_the_order_of_their_points(values):
    places = label_places(values)
    falling = sorted(places, reverse=True)
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in places)
    assert all(above - below >= 100 / max(20, len(values)) - 1e-6 for above, below in pairwise(falling))
    assert [values[places.index(place)] for place in falling] == sorted(values, reverse=True)


def test_layers_are_on_an_axis_and_each_recipe_is_named_once(tmp_path):
    place, ticks = layer_axis([30, 27, 30, 29])
    assert [(place(layer), name) for layer, name in ticks] == [(5, "27"), (65, "29"), (95, "30")]
    classical, echo, bag = tiny().results
    text, page = page_of(
        tiny(results=[classical, dataclasses.replace(echo, by_layer={"7": 0.7, "5": 0.6}), bag]), tmp_path
    )
    assert '<polyline points="5.0,100.0 95.0,0.0 "/>' in text
    by_layer, by_cost = ["60", "62", "64", "66", "68", "70"], ["20", "30", "40", "50", "60", "70"]
    assert page.all("span", class_="y") == by_layer + by_cost
    assert page.all("b") == ["1 Echo-2, mean", "1 Echo-2, mean", "2 Classical, mean"]


def test_the_strongest_control_of_each_sort():
    def control(recipe, value):
        return Result(recipe, "mean", True, {"A": Estimate(value, NAN, NAN)})

    untrained = control("Random weights, Echo-2", 0.1)
    echo = Result("Echo-2", "mean", False, {}, controls=(Control("random", untrained.name),))
    rows = [echo, untrained, control("Bag", 0.2), control("Bag, whitened", 0.25), control("tf-idf", 0.22)]
    found = levels(Comparison("m", "d", [tiny().tasks[0]], rows))
    assert [each.recipe for each in found] == ["Bag, whitened", "tf-idf", "Random weights, Echo-2"]
