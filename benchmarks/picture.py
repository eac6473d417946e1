"""Scores by model as a picture, which is drawn again when its data or this file have changed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from polars import col as c

import blocks
from blocks import Results

BLUE, ORANGE = "#2a6fbb", "#d9661f"
GREY, INK = "#767676", "#1f2328"
#: The same bytes each time; text stays text, in a font that comes with matplotlib.
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "st_reba",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip
#: Replacement of each colour on a dark screen.
DARK = {"#ffffff": "#0d1117", INK: "#e6edf3", GREY: "#9aa4af", BLUE: "#6aa9ee", ORANGE: "#f2914c"}


#: The picture, in the directory of the results.
FILE = "held-out.svg"


def image(results: Results, page: Path) -> str:
    """Return the image, as a page refers to it, with the scores as its alternative text."""
    data, path = by_model(results), results.directory / FILE
    parts = (
        f"{title}: {', '.join(f'{_short(name)} {100 * score:.1f}' for name, (score, *_) in scores.items())}"
        for title, scores in data.items()
    )
    text = f"Scores x 100 on test parts that nothing was chosen on. {'. '.join(parts)}"
    return f"![{text}]({Path(os.path.relpath(path, page.parent)).as_posix()})" if data else ""


def _short(name: str) -> str:
    return re.sub(", ours|, trained|, without a model|, at half the cost", "", name)


def is_stale(results: Results) -> bool:
    """Whether the file has other data or code. The drawing is not compared: versions of matplotlib differ."""
    path, data = results.directory / FILE, by_model(results)
    return bool(data) and not (path.is_file() and digest(data) in path.read_text(encoding="utf-8"))


def write(results: Results) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    data, path, drawn = by_model(results), results.directory / FILE, io.StringIO()
    with rc_context(STYLE):
        figure = Figure(layout="constrained")
        draw(figure, data)
        about = {"Date": None, "Creator": None, "Title": "Scores by model", "Description": digest(data)}
        figure.savefig(drawn, format="svg", metadata=about)
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    style = '<style type="text/css">'
    dark = f"{style}@media (prefers-color-scheme: dark){{{rules}}}"
    path.write_text(drawn.getvalue().replace(style, dark, 1), encoding="utf-8")


def digest(data: dict[str, Any]) -> str:
    """Return the digest of the data and of the code that draws them."""
    text = json.dumps(data, sort_keys=True) + Path(__file__).read_text(encoding="utf-8")
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def by_model(results: Results) -> dict[str, Any]:
    """Return [score, low, high] by set and reader."""
    rows, found = blocks.first_rows(results), {}
    for title in ("mean, English", "STS-B en (300), Spearman", "mean, Chinese"):
        own = rows.filter(c.set == blocks.HELD_OUT[title]).sort("at", maintain_order=True)
        found[title] = {label: [*scores] for label, *scores in own.select("label", "score", "low", "high").iter_rows()}
    return found if all(found.values()) else {}


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Draw a forest plot with a panel a set and a line a reader, the best first; trained readers are orange.

    Scores no better than the control without a model are shaded.
    """
    from matplotlib.ticker import MaxNLocator

    rows = [len(scores) for scores in data.values()]
    # Narrow, so that names can be read where a page is 390 pixels wide.
    figure.set_size_inches(5.6, 0.5 * len(rows) + 0.24 * sum(rows))
    axes = figure.subplots(len(rows), 1, height_ratios=rows, squeeze=False)[:, 0]
    for axis, (title, scores) in zip(axes, data.items(), strict=True):
        axis.set_title(title, loc="left", fontweight="bold")
        axis.grid(axis="x", color=GREY, alpha=0.2)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=(1, 2, 5, 10)))
        names = sorted(scores, key=lambda name: -scores[name][0])
        for place, name in enumerate(names):
            score, low, high = (100 * value for value in scores[name])
            colour = ORANGE if name.endswith(", trained") else BLUE if "ours" in name else GREY
            axis.errorbar(
                score, place, xerr=[[score - low], [high - score]], fmt="o", color=colour, elinewidth=1.8, markersize=5
            )
            at = {"xycoords": ("axes fraction", "data"), "va": "center", "ha": "right"}
            axis.annotate(f"{score:.1f}", (1.13, place), **at)
        axis.set_xlim(axis.get_xlim())
        for name in names:
            if name.endswith(", without a model"):
                axis.axvspan(axis.get_xlim()[0], 100 * scores[name][0], color=GREY, alpha=0.15, linewidth=0)
        axis.set_yticks(range(len(names)), names)
        axis.tick_params(axis="y", length=0)
        axis.invert_yaxis()
    figure.supxlabel("score x 100, 95% interval; shaded: no better than tf-idf", fontsize="medium")
