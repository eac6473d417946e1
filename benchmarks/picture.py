"""The score by layer, as a picture, drawn anew when what it shows has changed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivot import Conditions, Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2a6fbb", "#94b8e0", "#d9661f", "#3c8d40", "#8a5fb0", "#b0892a")
GREY, INK = "#9a9a9a", "#1f2328"
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


#: Of a line: (layer, score, low, high), by rising layer; the last two are None where there is no interval.
Points = list[tuple[int, float, float | None, float | None]]


@dataclass(frozen=True)
class Drawing:
    """What there is to draw: a title, lines and a level for each panel."""

    panels: dict[str, tuple[dict[str, Points], float | None]]
    level_title: str

    def digest(self) -> str:
        """Of what is drawn and of the code that draws it."""
        said = json.dumps([self.panels, self.level_title], sort_keys=True) + Path(__file__).read_text(encoding="utf-8")
        return hashlib.sha256(said.encode()).hexdigest()

    def stands_in(self, path: Path) -> bool:
        """Whether the file is of this drawing. What matplotlib makes of it is not compared: versions differ."""
        return path.is_file() and f"sha256:{self.digest()}" in path.read_text(encoding="utf-8")

    def write(self, path: Path) -> None:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        with rc_context(STYLE):
            figure = Figure(figsize=(3.6 * len(self.panels), 3.6), layout="constrained")
            axes = figure.subplots(1, len(self.panels), sharey=True, squeeze=False)[0]
            for axis, (title, (lines, level)) in zip(axes, self.panels.items(), strict=True):
                axis.set_title(title)
                axis.set_xlabel("layer")
                axis.xaxis.set_major_locator(MaxNLocator(integer=True))
                self._draw(axis, lines, level)
            axes[0].set_ylabel("Spearman x 100")
            handles = {
                line.get_label(): line for axis in axes for line in axis.get_lines() if line.get_label()[0] != "_"
            }
            figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {"Date": None, "Creator": None, "Title": "Score by layer", "Description": f"sha256:{self.digest()}"}
            figure.savefig(path, format="svg", metadata=about)

    def _draw(self, axis: Axes, lines: dict[str, Points], level: float | None) -> None:
        for colour, (title, points) in zip(COLOURS, lines.items(), strict=False):
            if not points:
                continue
            layers = [layer for layer, *_ in points]
            axis.plot(layers, [100 * score for _, score, *_ in points], color=colour, linewidth=1.6, label=title)
            if all(low is not None and high is not None for *_, low, high in points):
                lows, highs = ([100 * bound for bound in bounds] for bounds in list(zip(*points, strict=True))[2:])
                axis.fill_between(layers, lows, highs, color=colour, alpha=0.12, linewidth=0)
        if level is not None:
            axis.axhline(100 * level, color=GREY, linestyle="--", linewidth=1.2, label=self.level_title)


@dataclass(frozen=True)
class Picture:
    """Score by layer: a panel a model and set, a line a recipe, and a level that takes no layer.

    Attributes:
        name: Of the SVG file, which lies beside the results that it shows.
        panels: From left to right; those of which nothing was measured are left out.
    """

    name: str
    panels: tuple[Panel, ...]
    series: tuple[Series, ...]
    level: Series
    where: Conditions = field(default_factory=lambda: {"weights": "trained", "metric": "Spearman", "filter": ""})

    def path(self, store: Store) -> Path:
        return store.directory / self.name

    def drawing(self, store: Store) -> Drawing | None:
        """What the results have; None if that is nothing."""
        panels: dict[str, Any] = {}
        for panel in self.panels:
            common = {**self.where, "model": panel.model, "set": panel.set}
            precision = store.precision("scores", {**common, "layer": lambda layer: layer is not None})
            common["precision"] = precision
            lines = {series.title: self._points(store, {**common, **series.where}) for series in self.series}
            level = store.find("scores", {**common, **self.level.where})
            if any(lines.values()):
                panels[f"{panel.model}, {panel.set}"] = (lines, None if level is None else level["score"])
        return Drawing(panels, self.level.title) if panels else None

    @staticmethod
    def _points(store: Store, conditions: Conditions) -> Points:
        found = store.select("scores", {**conditions, "layer": lambda layer: layer is not None})
        scored = [record for record in found if record["score"] is not None]
        points: Any = ((record["layer"], record["score"], record["low"], record["high"]) for record in scored)
        return sorted(points)

    def render(self, store: Store, page: Path) -> str:
        """The image, as this page refers to it."""
        drawing = self.drawing(store)
        if drawing is None:
            return ""
        alt = f"Spearman correlation by layer: {'; '.join(drawing.panels)}"
        return f"![{alt}]({Path(os.path.relpath(self.path(store), page.parent)).as_posix()})"
