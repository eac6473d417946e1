"""Scores as pictures, by layer, by cost and by number of labels, each drawn anew when what it shows has changed."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pivot import Conditions, Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2a6fbb", "#94b8e0", "#d9661f", "#3c8d40", "#8a5fb0", "#b0892a")
GREY, INK = "#767676", "#1f2328"
#: The same bytes each time; text that is text, in a font that comes with matplotlib.
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "st_reba",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Panel:
    """One model on one set of pairs."""

    model: str
    set: str


@dataclass(frozen=True)
class Series:
    """A line: which rows of scores.csv, by layer."""

    title: str
    where: Conditions


#: Of a line: (layer or count, score, low, high), the first rising; the last two are None where there is no interval.
Points = list[tuple[int, float, float | None, float | None]]


@dataclass(frozen=True)
class Drawing(ABC):
    """What there is to draw."""

    title = ""

    def digest(self) -> str:
        """Of what is drawn and of the code that draws it."""
        said = json.dumps(list(asdict(self).values()), sort_keys=True) + Path(__file__).read_text(encoding="utf-8")
        return hashlib.sha256(said.encode()).hexdigest()

    def stands_in(self, path: Path) -> bool:
        """Whether the file is of this drawing. What matplotlib makes of it is not compared: versions differ."""
        return path.is_file() and f"sha256:{self.digest()}" in path.read_text(encoding="utf-8")

    def write(self, path: Path) -> None:
        from matplotlib import rc_context

        with rc_context(STYLE):
            figure = self.figure()
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {"Date": None, "Creator": None, "Title": self.title, "Description": f"sha256:{self.digest()}"}
            figure.savefig(path, format="svg", metadata=about)

    @abstractmethod
    def figure(self) -> Figure:
        """All of it."""


@dataclass(frozen=True)
class Lines(Drawing):
    """Score by layer: lines and a level for each panel."""

    panels: dict[str, tuple[dict[str, Points], float | None]]
    level_title: str
    title = "Score by layer"

    def figure(self) -> Figure:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(3.6 * len(self.panels), 3.6), layout="constrained")
        axes = figure.subplots(1, len(self.panels), sharey=True, squeeze=False)[0]
        for axis, (title, (lines, level)) in zip(axes, self.panels.items(), strict=True):
            axis.set_title(title)
            axis.set_xlabel("layer")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            self._draw(axis, lines, level)
        axes[0].set_ylabel("Spearman x 100")
        handles = {line.get_label(): line for axis in axes for line in axis.get_lines() if line.get_label()[0] != "_"}
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False)
        return figure

    def _draw(self, axis: Axes, lines: dict[str, Points], level: float | None) -> None:
        draw_lines(axis, lines)
        if level is not None:
            axis.axhline(100 * level, color=GREY, linestyle="--", linewidth=1.2, label=self.level_title)


def draw_lines(axis: Axes, lines: dict[str, Points], marker: str = "") -> None:
    """Scores as lines, with bands where all of a line's points have an interval."""
    for colour, (title, points) in zip(COLOURS, lines.items(), strict=False):
        if not points:
            continue
        places = [place for place, *_ in points]
        scores = [100 * score for _, score, *_ in points]
        axis.plot(places, scores, color=colour, linewidth=1.6, marker=marker, markersize=4, label=title)
        if all(low is not None and high is not None for *_, low, high in points):
            lows, highs = ([100 * bound for bound in bounds] for bounds in list(zip(*points, strict=True))[2:])
            axis.fill_between(places, lows, highs, color=colour, alpha=0.12, linewidth=0)


@dataclass(frozen=True)
class Curves(Drawing):
    """Score by number of labels: lines, and levels that need none, for each panel."""

    panels: dict[str, tuple[dict[str, Points], dict[str, float]]]
    title = "Score by number of labels"

    def figure(self) -> Figure:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator

        figure = Figure(figsize=(4.4 * len(self.panels), 4.2), layout="constrained")
        axes = figure.subplots(1, len(self.panels), squeeze=False)[0]
        for axis, (title, (lines, levels)) in zip(axes, self.panels.items(), strict=True):
            axis.set_title(title)
            axis.set_xlabel("labelled pairs")
            draw_lines(axis, lines, marker="o")
            for style, (name, level) in zip(("--", ":", "-."), levels.items(), strict=False):
                axis.axhline(100 * level, color=GREY, linestyle=style, linewidth=1.2, label=name)
            counts = sorted({count for points in lines.values() for count, *_ in points})
            axis.set_xscale("log")
            axis.set_xticks(counts, [f"{count:,}" for count in counts])
            axis.xaxis.set_minor_locator(NullLocator())
        axes[0].set_ylabel("Spearman x 100")
        handles = {line.get_label(): line for axis in axes for line in axis.get_lines() if line.get_label()[0] != "_"}
        columns = len(self.panels)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False)
        return figure


class Point(NamedTuple):
    """A recipe: its cost and score, and where its name stands beside it, in points to the right and up."""

    name: str
    cost: float
    score: float
    low: float
    high: float
    right: float
    up: float


@dataclass(frozen=True)
class Points2D(Drawing):
    """Score against cost: a point a recipe, and levels that have no such cost."""

    points: list[Point]
    levels: dict[str, float]
    unit: str
    title = "Score against cost"

    def figure(self) -> Figure:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator

        # Narrow, so that names can be read where a page is 390 pixels wide.
        figure = Figure(figsize=(5.2, 4.2), layout="constrained")
        axis = figure.subplots()
        for point in self.points:
            score, low, high = (100 * value for value in point[2:5])
            axis.errorbar(
                point.cost, score, [[score - low], [high - score]], fmt="o", color=COLOURS[0], ecolor=COLOURS[1],
                elinewidth=1.2, markersize=5,
            )  # fmt: skip
            axis.annotate(
                point.name, (point.cost, score), (point.right, point.up), textcoords="offset points", va="center",
                ha="left" if point.right >= 0 else "right",
            )  # fmt: skip
        for colour, (name, level) in zip((GREY, COLOURS[2]), self.levels.items(), strict=False):
            axis.axhline(100 * level, color=colour, linestyle="--", linewidth=1.2)
            axis.annotate(
                name, (1, 100 * level), (-2, 5), xycoords=("axes fraction", "data"), textcoords="offset points",
                ha="right", color=colour,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        most = max(point.cost for point in self.points)
        ticks = [tick for tick in (0.5, 1, 2, 4, 8, 16, 32) if tick <= 1.2 * most]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel(f"time, {self.unit} = 1")
        axis.set_ylabel("Spearman x 100")
        return figure


class Picture(ABC):
    """A file beside the results that it shows, and the line that shows it on a page."""

    name: str

    @abstractmethod
    def drawing(self, store: Store) -> Drawing | None:
        """What the results have; None if that is nothing."""

    @abstractmethod
    def alt(self, drawing: Any) -> str:
        """What it shows, in words."""

    def path(self, store: Store) -> Path:
        return store.directory / self.name

    def render(self, store: Store, page: Path) -> str:
        """The image, as this page refers to it."""
        drawing = self.drawing(store)
        if drawing is None:
            return ""
        return f"![{self.alt(drawing)}]({Path(os.path.relpath(self.path(store), page.parent)).as_posix()})"


@dataclass(frozen=True)
class ByLayer(Picture):
    """Score by layer: a panel a model and set, a line a recipe, and a level that takes no layer.

    Attributes:
        name: Of the SVG file.
        panels: From left to right; those of which nothing was measured are left out.
    """

    name: str
    panels: tuple[Panel, ...]
    series: tuple[Series, ...]
    level: Series
    where: Conditions = field(default_factory=lambda: {"weights": "trained", "metric": "Spearman", "filter": ""})

    def alt(self, drawing: Lines) -> str:
        return f"Spearman correlation by layer: {'; '.join(drawing.panels)}"

    def drawing(self, store: Store) -> Lines | None:
        panels: dict[str, Any] = {}
        for panel in self.panels:
            common = {**self.where, "model": panel.model, "set": panel.set}
            precision = store.precision("scores", {**common, "layer": lambda layer: layer is not None})
            common["precision"] = precision
            lines = {series.title: self._points(store, {**common, **series.where}) for series in self.series}
            level = store.find("scores", {**common, **self.level.where})
            if any(lines.values()):
                panels[f"{panel.model}, {panel.set}"] = (lines, None if level is None else level["score"])
        return Lines(panels, self.level.title) if panels else None

    @staticmethod
    def _points(store: Store, conditions: Conditions) -> Points:
        found = store.select("scores", {**conditions, "layer": lambda layer: layer is not None})
        scored = [record for record in found if record["score"] is not None]
        points: Any = ((record["layer"], record["score"], record["low"], record["high"]) for record in scored)
        return sorted(points)


@dataclass(frozen=True)
class ByLabels(Picture):
    """Score by number of labelled pairs: a panel a model and set, a line a method of freeze.csv.

    Attributes:
        name: Of the SVG file.
        panels: From left to right; those of which nothing was measured are left out.
        series: Rows of freeze.csv.
        levels: Rows of scores.csv: what needs no labels of the panel's set. A model in them is instead of the panel's.
    """

    name: str
    panels: tuple[Panel, ...]
    series: tuple[Series, ...]
    levels: tuple[Series, ...]

    def alt(self, drawing: Curves) -> str:
        return f"Spearman correlation by number of labelled pairs: {'; '.join(drawing.panels)}"

    def drawing(self, store: Store) -> Curves | None:
        panels: dict[str, Any] = {}
        for panel in self.panels:
            common: Conditions = {"model": panel.model, "set": panel.set, "metric": "Spearman", "seed": None}
            lines = {series.title: self._points(store, {**common, **series.where}) for series in self.series}
            untrained: Conditions = {"set": panel.set, "metric": "Spearman", "weights": "trained", "layer": None}
            levels = {
                series.title: found["score"]
                for series in self.levels
                if (found := store.find("scores", {**untrained, "model": panel.model, **series.where})) is not None
            }
            if any(lines.values()):
                panels[f"{panel.model}, {panel.set}"] = (lines, levels)
        return Curves(panels) if panels else None

    @staticmethod
    def _points(store: Store, conditions: Conditions) -> Points:
        points: Any = (
            (record["pairs"], record["score"], record["low"], record["high"])
            for record in store.select("freeze", conditions)
        )
        return sorted(points)


@dataclass(frozen=True)
class Named:
    """A recipe in a picture: its rows of scores.csv, and where its name stands, in points to the right and up."""

    recipe: str
    pooling: str
    right: float = 7
    up: float = 0
    filter: str = ""


@dataclass(frozen=True)
class ByCost(Picture):
    """Score against cost of recipes at their own ends, on one model and set.

    Attributes:
        name: Of the SVG file.
        panel: Which model and set.
        recipes: In what order they are drawn; those of which nothing was measured are left out.
        levels: What is drawn as a line, from rows of scores.csv.
        unit: The recipe whose time is 1.
    """

    name: str
    panel: Panel
    recipes: tuple[Named, ...]
    levels: tuple[Series, ...]
    unit: str

    def alt(self, drawing: Points2D) -> str:
        said = "; ".join(f"{point.name} {100 * point.score:.1f} at {point.cost:.1f}" for point in drawing.points)
        return f"Spearman correlation x 100 on {self.panel.set} against time, {self.panel.model}: {said}"

    def drawing(self, store: Store) -> Points2D | None:
        timed = store.select("cost", {"table": "recipes", "model": self.panel.model, "unit": self.unit})
        times = {record["contender"]: record["value"] for record in timed}
        # Of the unit itself nothing is noted.
        times[self.unit] = 1.0
        common: Conditions = {"set": self.panel.set, "metric": "Spearman", "weights": "trained", "layer": None}
        own = {**common, "model": self.panel.model}
        own["precision"] = store.precision("scores", own)
        names = [named.recipe for named in self.recipes]
        points = []
        for named in self.recipes:
            where = {"recipe": named.recipe, "pooling": named.pooling, "filter": named.filter}
            found = store.find("scores", {**own, **where})
            cost: Any = times.get(f"{named.recipe}, {named.pooling}")
            if found is not None and cost is not None:
                score, low, high = (cast(float, found[name]) for name in ("score", "low", "high"))
                name = named.recipe if names.count(named.recipe) == 1 else f"{named.recipe}, {named.pooling}"
                points.append(Point(name, cost, score, low, high, named.right, named.up))
        levels: Any = {
            series.title: found["score"]
            for series in self.levels
            if (found := store.find("scores", {**common, **series.where})) is not None
        }
        return Points2D(points, levels, self.unit) if len(points) > 1 else None
