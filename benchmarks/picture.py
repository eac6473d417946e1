"""Scores by model as a picture, which is drawn again when its data or this file have changed."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

from polars import col as c

import blocks
from blocks import Results
from tabular import REFERENCES

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
FILE = "scores.svg"
RECIPE, TRAINED = "Echo topic", ", trained"
#: Its lines, from grid.csv. Readers without a language model were scored once for each of the models.
LINES = {
    **{
        f"{RECIPE}, {size}": (c.recipe == RECIPE) & (c.fitted_on == blocks.USUAL_FIT) & (c.model == name)
        for size, name in reversed(blocks.SIZES.items())
    },
    **{f"{name}{TRAINED}": (c.recipe == name) & (c.model == blocks.GEMMA) for name in REFERENCES},
    "tf-idf": (
        (c.recipe == "tf-idf") & (c.model == blocks.SMOLLM2)
        | (c.recipe == "tf-idf of characters") & (c.model == blocks.GEMMA)
    ),
}
#: Its panels: all models on the same items.
PANELS = {
    "English, similarity": f"{blocks.ENGLISH}, 300 pairs",
    "English, classes": "mean of 4 test parts with classes, en",
    "Chinese, similarity": f"{blocks.CHINESE}, 300 pairs",
    "Chinese, classes": "TNews test, 300 texts",
}


def image(results: Results, page: Path) -> str:
    """Return the image, as a page refers to it, with the scores as its alternative text."""
    data, path = by_model(results), results.directory / FILE
    parts = []
    for title, scores in data.items():
        names = (name.removeprefix(f"{RECIPE}, ").removesuffix(TRAINED) for name in scores)
        each = (f"{name} {100 * score:.1f}" for name, (score, *_) in zip(names, scores.values(), strict=True))
        parts.append(f"{title}: {', '.join(each)}")
    text = f"Scores x 100 of {RECIPE} on language models, of trained encoders and of tf-idf. {'. '.join(parts)}"
    return f"![{text}]({Path(os.path.relpath(path, page.parent)).as_posix()})" if data else ""


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
    rows, found = blocks.labelled(results.of("grid", c.against == ""), LINES), {}
    for title, name in PANELS.items():
        own = rows.filter(c.set == name).sort("at", maintain_order=True)
        found[title] = {label: [*scores] for label, *scores in own.select("label", "score", "low", "high").iter_rows()}
    return found if all(found.values()) else {}


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Draw two panels a language, with a line a reader; trained encoders are orange, and tf-idf is a dashed line."""
    # Narrow, so that names can be read where a page is 390 pixels wide.
    panels = list(data.values())
    readers = [list({**left, **right}) for left, right in zip(panels[::2], panels[1::2], strict=True)]
    rows = [len(names) for names in readers]
    figure.set_size_inches(5.6, 0.5 * len(rows) + 0.24 * sum(rows))
    axes = figure.subplots(len(rows), 2, height_ratios=rows, sharey="row", squeeze=False)
    for axis, place, (title, scores) in zip(axes.flat, range(len(data)), data.items(), strict=True):
        names = readers[place // 2]
        axis.set_title(title, loc="left", fontweight="bold", fontsize="medium")
        axis.grid(axis="x", color=GREY, alpha=0.2)
        for name, (score, low, high) in scores.items():
            colour = ORANGE if name.endswith(TRAINED) else BLUE if name.startswith(RECIPE) else GREY
            at, ends = names.index(name), [[100 * (score - low)], [100 * (high - score)]]
            axis.errorbar(100 * score, at, xerr=ends, fmt="o", color=colour, elinewidth=1.8, markersize=5)
            axis.annotate(f"{100 * score:.0f}", (1.12, at), xycoords=("axes fraction", "data"), va="center", ha="right")
            if name == "tf-idf":
                axis.axvline(100 * score, color=GREY, linestyle="--", linewidth=1, zorder=0)
        axis.set_yticks(range(len(names)), names)
        axis.tick_params(axis="y", length=0)
    for first, count in zip(axes[:, 0], rows, strict=True):
        first.set_ylim(count - 0.4, -0.6)
    figure.supxlabel("score x 100, 95% interval; dashed: tf-idf, which needs no model", fontsize="medium")
