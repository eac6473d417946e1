from __future__ import annotations

import base64
import csv
import dataclasses
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread

from st_reba.compare.report import page as report
from st_reba.compare.report.page import write_csv, write_report, write_results
from st_reba.compare.results import Comparison, Result, measured
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure

from . import samples

SAYS = "The text stands 2 times, and is read in its last copy."
VOID = {"meta", "link", "br", "hr", "img", "input", "source"}


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
        element = (tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, _, text in self.open:
            text.append(data)

    def all(self, tag: str, **wanted: str) -> list[str]:
        """The texts of the elements of a name, those that have all the given attributes."""
        wanted = {name.rstrip("_"): value for name, value in wanted.items()}
        return [
            " ".join("".join(text).split())
            for name, attributes, text in self.elements
            if name == tag and wanted.items() <= attributes.items()
        ]

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
    comparison = samples.demo()
    path = write_report(comparison, directory)
    assert path == directory / "report.html"
    return comparison, directory, Page(path.read_text(encoding="utf-8"))


def tiny(**changes) -> Comparison:
    """Two recipes and a control on two tasks, of which the second is better the lower it is."""
    tasks = [Measure("A", "accuracy, %", chance=0.25, note="Of two."), Measure("B", "distance", 1.0, False)]
    classical = {"A": Estimate(0.5, 0.4, 0.6, True), "B": Estimate(3.0, 2.5, 3.5)}
    echo = {"A": Estimate(0.7, 0.6, 0.8, True), "B": Estimate(4.0, 3.5, 4.5)}
    bag = {"A": Estimate(0.2, 0.1, 0.3), "B": Estimate(1.0, 0.5, 1.5)}
    results = [
        Result("Classical", "mean", False, classical, 10.0, 1.0),
        Result("Echo-2", "mean", False, echo, 5.0, 2.0, says=SAYS),
        Result("Bag of input embeddings", "mean", True, bag),
    ]
    return dataclasses.replace(Comparison("a model", "texts", tasks, results), **changes)


def page_of(comparison: Comparison, tmp_path) -> tuple[str, Page]:
    text = write_report(comparison, tmp_path / "out").read_text(encoding="utf-8")
    return text, Page(text)


def test_every_recipe_and_score_is_in_the_table(demo):
    comparison, _, page = demo
    rows = {cells[0]: cells[1:] for cells in page.rows()}
    random = comparison.on_random_weights
    untrained = {result.name for result in random.values()}
    shown = [result for result in comparison.results if result.name not in untrained]
    for result in shown:
        cells = rows[f"{result.recipe} {result.pooling}"]
        # Each task has two columns: the second is on random weights.
        for index, task in enumerate(comparison.tasks):
            cell, beside = cells[2 * index : 2 * index + 2]
            if task.name in result.scores:
                score = result.scores[task.name]
                assert cell.startswith(task.show(score.value))
                assert cell.endswith(task.show_interval(score))
            else:
                assert cell == "–not applicable"
            control = random[result.name].scores.get(task.name) if result.name in random else None
            assert beside == ("" if control is None else task.show(control.value))
        assert cells[-2:] == [f"{measured(result.cost)}×", measured(result.sentences_per_second)]
    # The header twice, as some rows are folded away; and the line above the controls.
    assert len(page.rows()) == len(shown) + 3
    assert page.all("summary")[0] == f"{len(shown) - 1 - report._OPEN_ROWS} more recipes"


def test_what_the_recipes_are(tmp_path, undrawn):
    text, page = page_of(tiny(), tmp_path)
    assert "What the recipes are" in text
    assert ("Echo-2" in page.all("dt"), SAYS in page.all("dd")) == (True, True)
    assert "Classical" not in page.all("dt")


def test_rows_are_sorted_and_controls_set_apart(demo):
    _, _, page = demo
    names = [cells[0] for cells in page.rows()]
    apart = names.index("Controls, there to be beaten")
    assert names[1] == "Echo-3 mean"
    assert names[apart + 1] == "Bag of input embeddings mean"
    assert names[apart + 2] == "Recipe pooling"
    assert not any(name.startswith("Random weights") for name in names)
    shown = [
        float(cells[1].split("[")[0].split("≈")[0].split("best")[0].replace("−", "-")) for cells in page.rows()[1:apart]
    ]
    assert shown == sorted(shown, reverse=True)


def test_the_best_of_each_column_is_bold_and_ties_are_marked(tmp_path, undrawn):
    _, page = page_of(tiny(), tmp_path)
    rows = page.rows()
    assert rows[1] == ["Echo-2 mean", "70.0 best [60.0, 80.0]", "4.000 [3.500, 4.500]", "2.0×", "5.0"]
    assert rows[2] == [
        "Classical mean",
        "50.0≈ cannot be told from the best [40.0, 60.0]",
        "3.000 best [2.500, 3.500]",
        "1.0×",
        "10",
    ]
    assert rows[4] == ["Bag of input embeddings mean", "20.0 [10.0, 30.0]", "1.000 [0.500, 1.500]", "", ""]
    assert page.all("strong") == ["bold", "70.0", "3.000"]


def test_the_answer_comes_first_and_then_what_to_type(demo, tmp_path, undrawn):
    comparison, _, page = demo
    assert page.all("p", class_="first") == [comparison.answer]
    assert [tag for tag, attributes, _ in page.elements if tag in ("section", "figure", "table")][:3] == [
        "section",
        "section",
        "figure",
    ]
    assert page.all("section", class_="answer")[0].startswith(f"The answer {comparison.answer}")
    for sentence in comparison.verdict:
        assert sentence in page.all("li")
    assert "pre" not in {tag for tag, _, _ in page.elements[: [tag for tag, _, _ in page.elements].index("figure")]}
    used = samples.real()
    _, page = page_of(used, tmp_path)
    assert page.all("code") == [used.build, used.command]


def test_what_was_set_and_measured(demo):
    comparison, _, page = demo
    text = page.all("main")[0]
    for task in comparison.tasks:
        assert f"{task.note} {task.metric[:1].upper()}{task.metric[1:]}, higher is better" in text
    for name, value in (comparison.settings | comparison.versions).items():
        assert f"{name}{value}" in text
    assert page.all("code")[-1] == comparison.command
    assert page.all("time", datetime="2026-11-20") == ["2026-11-20"]
    for name, reason in comparison.skipped:
        assert f"{name}{reason}" in text


def test_the_table_can_be_read_aloud(demo):
    _, _, page = demo
    html = [attributes for tag, attributes, _ in page.elements if tag == "html"]
    assert html == [{"lang": "en"}]
    heads = [attributes for tag, attributes, _ in page.elements if tag == "th"]
    assert {head["scope"] for head in heads} == {"col", "row", "rowgroup"}
    figures = [attributes for tag, attributes, _ in page.elements if tag == "img"]
    assert len(figures) == 3  # cost, two tasks
    assert all(len(figure["alt"] or "") > 40 for figure in figures)


def test_the_page_loads_nothing(demo):
    _, directory, page = demo
    text = (directory / "report.html").read_text(encoding="utf-8")
    assert "//" not in re.sub(r"data:image/svg\+xml;base64,[\w+/=]+", "", text)
    assert not {tag for tag, _, _ in page.elements} & {"script", "iframe", "object", "embed"}
    assert all(attributes.get("src", "data:").startswith("data:") for _, attributes, _ in page.elements)
    links = [attributes["href"] for tag, attributes, _ in page.elements if tag in ("a", "link")]
    assert links.pop(0) == "data:,"
    assert sorted(links) == sorted(path.name for path in directory.iterdir() if path.name != "report.html")


def test_ids_are_unique_and_references_lead_somewhere(demo):
    _, directory, page = demo
    text = (directory / "report.html").read_text(encoding="utf-8")
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'aria-labelledby="([^"]+)"', text)) <= set(ids)


def pictures(page: Page) -> list[str]:
    """What the address of each figure holds."""
    addresses = [attributes["src"] for tag, attributes, _ in page.elements if tag == "img"]
    return [base64.b64decode(address.partition(",")[2]).decode() for address in addresses]


def test_figures_are_text_in_the_colours_of_the_page(demo):
    found = pictures(demo[2])
    for drawn in found:
        root = ElementTree.fromstring(drawn)
        assert root.tag.endswith("svg")
        assert root.findall(".//{http://www.w3.org/2000/svg}text")
    assert any("Echo-2, bidirectional, last" in drawn for drawn in found)


def test_the_figures_lie_beside_it(demo):
    _, directory, _ = demo
    names = ["cost.png", "scores-01-sts.png", "scores-02-word-sense.png"]
    assert sorted(path.name for path in directory.glob("*.png")) == names
    for name in names:
        pixels = imread(directory / name)
        assert min(pixels.shape[:2]) > 300
        assert pixels.std() > 0.05


def test_the_numbers_survive_in_the_csv(demo):
    comparison, directory, _ = demo
    rows = list(csv.DictReader((directory / "results.csv").open(encoding="utf-8", newline="")))
    random = comparison.on_random_weights
    untrained = {result.name for result in random.values()}
    for result, row in zip([each for each in comparison.results if each.name not in untrained], rows, strict=True):
        assert (row["recipe"], row["pooling"], row["control"]) == (result.recipe, result.pooling, str(result.control))
        assert (float(row["texts_per_second"]), float(row["cost"])) == (result.sentences_per_second, result.cost)
        for task in comparison.tasks:
            cells = [row[f"{task.name}{part}"] for part in ("", " low", " high", " tied")]
            score = result.scores.get(task.name)
            assert cells == (
                ["", "", "", ""] if score is None else [str(value) for value in dataclasses.astuple(score)]
            )
            beside = random[result.name].scores.get(task.name) if result.name in random else None
            assert row[f"{task.name} random"] == ("" if beside is None else str(beside.value))


def test_what_was_not_timed_is_empty_in_the_csv(tmp_path):
    write_csv(tiny(), tmp_path / "results.csv")
    assert (tmp_path / "results.csv").read_text(encoding="utf-8").splitlines()[-1] == (
        "Bag of input embeddings,mean,True,0.2,0.1,0.3,False,,1.0,0.5,1.5,False,,,,"
    )


def test_a_row_names_what_it_stands_for(tmp_path, undrawn):
    found = tiny()
    first = dataclasses.replace(found.results[0], same_as=("ReBA-1", "Bidirectional"))
    _, page = page_of(dataclasses.replace(found, results=[first, *found.results[1:]]), tmp_path)
    assert f"{first.recipe} = ReBA-1 = Bidirectional {first.pooling}" in [cells[0] for cells in page.rows()]
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").open(encoding="utf-8", newline="")))
    assert (rows[0]["recipe"], rows[0]["same_as"]) == (first.recipe, "ReBA-1; Bidirectional")
    assert {row["same_as"] for row in rows[1:]} == {""}


def test_whatever_text_there_is_does_no_harm(tmp_path):
    evil = '<script>alert("1")</script>$x_{$ 模型 \x07 &amp;'
    task = Measure(evil, evil, note=evil)
    results = [
        Result(f"{evil} {index}", evil, index == 2, {evil: Estimate(0.1 * index, 0.0, 0.3, True)}, 1.0, 1.0)
        for index in range(3)
    ]
    comparison = Comparison(
        evil, evil, [task], results, [evil], [(evil, evil)], [3, 4], {evil: evil}, {evil: evil}, evil, evil
    )
    text, page = page_of(comparison, tmp_path)
    assert "<script" not in text
    assert page.all("h1") == [" ".join(f"Which recipe for {evil}?".split())]
    assert page.all("code")[0].startswith('<script>alert("1")</script>$x_{$ 模型')
    assert any("$x_{$ 模型 &amp;amp;" in drawn for drawn in pictures(page))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "report.html",
        "comparison.json",
        "results.csv",
        "cost.png",
        "scores-01-script-alert-1-script-x-amp.png",
    }


def test_proxies_are_called_so(tmp_path, undrawn):
    text, page = page_of(samples.proxies(), tmp_path)
    said = page.all("aside", role="note")
    assert said[0].startswith("Measured without labels. All scores here are proxies: they hint at quality")
    assert "Mean squared distance, lower is better, on texts.txt: 3 texts." in page.all("section", class_="answer")[0]
    assert page.all("th", scope="col")[1].startswith("Alignment proxy mean squared distance ↓")
    # Nothing was timed, and there are no intervals.
    assert "Cost" not in " ".join(page.all("th"))
    assert "95% bootstrap interval" not in text
    assert not (tmp_path / "out" / "cost.png").exists()


def test_some_proxies_are_named(tmp_path, undrawn):
    comparison = tiny()
    tasks = [comparison.tasks[0], dataclasses.replace(comparison.tasks[1], proxy=True)]
    _, page = page_of(dataclasses.replace(comparison, tasks=tasks), tmp_path)
    assert page.all("aside", role="note")[0].startswith("Measured without labels. B: proxies, which hint at quality")


def test_labelled_tasks_bring_no_warning(demo):
    assert demo[2].all("aside") == []


def test_a_score_that_is_no_number(tmp_path, undrawn):
    nan = float("nan")
    comparison = tiny()
    lost = Result("ReBA-2", "mean", False, {"A": Estimate(nan, nan, nan)}, 5.0, 2.0)
    _, page = page_of(dataclasses.replace(comparison, results=[lost, *comparison.results]), tmp_path)
    assert page.rows()[1][0] == "Echo-2 mean"
    assert page.rows()[3] == ["ReBA-2 mean", "n/a", "–not applicable", "2.0×", "5.0"]


def test_a_long_page_folds(tmp_path, monkeypatch, undrawn):
    monkeypatch.setattr(report, "_OPEN_ROWS", 2)
    comparison = samples.cmteb()
    small = dataclasses.replace(comparison, tasks=comparison.tasks[:4], results=comparison.results[-12:])
    text, page = page_of(small, tmp_path)
    assert "Which recipe for 智源/悟道-中文语言模型-7B?" in text
    assert page.all("summary") == ["1 more recipe", "Task by task", "What was measured", "How this was made"]
    assert len(page.rows()) == 15
    assert all(len(cells) == 7 for cells in page.rows() if not cells[0].startswith("Controls"))
    assert len(page.all("img")) == 5


@pytest.mark.parametrize("broken", ["scores_figure", "_render"])
def test_a_report_that_fails_leaves_nothing(broken, tmp_path, monkeypatch, undrawn):
    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(report, broken, fail)
    with pytest.raises(OSError, match="no space left on device"):
        write_report(samples.proxies(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="exists and is not an empty directory: choose another directory, or remove"):
        write_report(tiny(), tmp_path)
    with pytest.raises(ValueError, match="choose another --report, or remove it"):
        write_report(tiny(), tmp_path, "--report")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_comparison_without_tasks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="A comparison without tasks has nothing to show"):
        write_report(tiny(tasks=[]), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("results", [[], tiny().results[2:]])
def test_a_comparison_that_decides_nothing_is_shown_all_the_same(results, tmp_path):
    page = write_report(tiny(results=results), tmp_path / "out").read_text(encoding="utf-8")
    assert 'class="leader"' not in page
    assert not (tmp_path / "out" / "cost.png").exists()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("matplotlib.figure", "Drawing needs matplotlib"),
        ("jinja2", "A report needs jinja2: pip install"),
    ],
)
def test_what_is_not_installed_is_said_at_once(missing, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=message):
        write_report(tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert write_results(tiny(), tmp_path / "out") == tmp_path / "out" / "results.csv"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.csv", "comparison.json"}
    assert Comparison.load(tmp_path / "out" / "comparison.json") == tiny()
