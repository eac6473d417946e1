"""Scores as pictures, by layer, by cost and by number of labels, each drawn anew when what it shows has changed."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
from polars import col as c

import blocks
from blocks import CHINESE, EARLY_LATE, ENGLISH, GEMMA, PARTWISE, SMOLLM2, SPEARMAN, TRAINED, Results, one_precision
from grid import REFERENCES

COLOURS = ("#2a6fbb", "#94b8e0", "#d9661f", "#3c8d40", "#8a5fb0", "#b0892a")
GREY, INK = "#767676", "#1f2328"
#: The same bytes each time; text that is text, in a font that comes with matplotlib.
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "st_reba",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip
#: What each colour becomes where the reader's screen is dark.
DARK = {
    "#ffffff": "#0d1117", INK: "#e6edf3", GREY: "#9aa4af", COLOURS[0]: "#6aa9ee", COLOURS[1]: "#4a72a0",
    COLOURS[2]: "#f2914c", COLOURS[3]: "#66bb6a", COLOURS[4]: "#b794d8", COLOURS[5]: "#d4b04a",
}  # fmt: skip
AT_ITS_END = c.layer.is_null()


@dataclass(frozen=True)
class Picture:
    """A file beside the results that it shows, and the line that shows it on a page.

    Attributes:
        file: Its name.
        title: Of the file.
        data: What there is to draw, as JSON has it; empty if that is nothing.
        says: The same in words.
        draw: Puts that data into an empty figure.
    """

    file: str
    title: str
    data: Callable[[Results], dict[str, Any]]
    says: Callable[[dict[str, Any]], str]
    draw: Callable[[Any, dict[str, Any]], None]

    def __call__(self, results: Results, page: Path) -> str:
        """The image, as this page refers to it."""
        data, path = self.data(results), results.directory / self.file
        return f"![{self.says(data)}]({Path(os.path.relpath(path, page.parent)).as_posix()})" if data else ""

    def is_stale(self, results: Results) -> bool:
        """Whether the file is of other data or code. What matplotlib makes of it is not compared: versions differ."""
        path, data = results.directory / self.file, self.data(results)
        return bool(data) and not (path.is_file() and digest(data) in path.read_text(encoding="utf-8"))

    def write(self, results: Results) -> None:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        data, path = self.data(results), results.directory / self.file
        with rc_context(STYLE):
            path.parent.mkdir(parents=True, exist_ok=True)
            figure = Figure(layout="constrained")
            self.draw(figure, data)
            about = {"Date": None, "Creator": None, "Title": self.title, "Description": digest(data)}
            drawn = io.StringIO()
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
    """Of what is drawn and of the code that draws it."""
    said = json.dumps(data, sort_keys=True) + Path(__file__).read_text(encoding="utf-8")
    return f"sha256:{hashlib.sha256(said.encode()).hexdigest()}"


def panels(
    models: dict[tuple[str, str], tuple[pl.DataFrame, pl.DataFrame]],
    by: str,
    lines: dict[str, pl.Expr],
    levels: dict[str, pl.Expr],
) -> dict[str, Any]:
    """A panel for each model and set that has lines.

    Args:
        models: By model and set, the rows of which the lines are made, and those that have the levels.
        by: The field on the horizontal axis.
        lines: By title, which rows.
        levels: By title, the row of a score that has no such field.
    """
    found = {}
    for name, (rows, others) in models.items():
        points = {
            title: rows.filter(where, c.score.is_not_null()).select(by, "score", "low", "high").sort(by).rows()
            for title, where in lines.items()
        }
        level = {title: others.filter(where)["score"].to_list() for title, where in levels.items()}
        if any(points.values()):
            found[", ".join(name)] = [points, {title: scores[-1] for title, scores in level.items() if scores}]
    return found


def draw_panels(figure: Any, data: dict[str, Any], label: str, width: float, height: float, by_count: bool) -> None:
    """Lines, with bands where all of a line's points have an interval, and levels; a legend below all panels."""
    from matplotlib.ticker import MaxNLocator

    figure.set_size_inches(width * len(data), height)
    axes = figure.subplots(1, len(data), sharey=not by_count, squeeze=False)[0]
    for axis, (title, (lines, levels)) in zip(axes, data.items(), strict=True):
        axis.set(title=title, xlabel=label)
        if not by_count:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
            if not points:
                continue
            places, *columns = zip(*points, strict=True)
            scores, lows, highs = ([None if each is None else 100 * each for each in column] for column in columns)
            axis.plot(places, scores, color=colour, linewidth=1.6, marker="o" * by_count, markersize=4, label=name)
            if None not in lows + highs:
                axis.fill_between(places, lows, highs, color=colour, alpha=0.12, linewidth=0)
        for style, (name, level) in zip(("--", ":", "-.", (0, (1, 4))), levels.items(), strict=False):
            axis.axhline(100 * level, color=GREY, linestyle=style, linewidth=1.2, label=name)
        if by_count:
            counts = sorted({count for points in lines.values() for count, *_ in points})
            axis.set_xscale("log")
            axis.set_xticks(counts, [f"{count:,}" for count in counts])
            axis.minorticks_off()
    axes[0].set_ylabel("Spearman x 100")
    handles = {line.get_label(): line for axis in axes for line in axis.get_lines() if line.get_label()[0] != "_"}
    ncols = len(data) if by_count else 3
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=ncols, frameon=False)


def by_layer(results: Results) -> dict[str, Any]:
    models = {}
    for model, pairs in ((SMOLLM2, ENGLISH), (GEMMA, ENGLISH), (GEMMA, CHINESE)):
        rows = results.of("scores", TRAINED, SPEARMAN, c.filter == "", c.model == model, c.set == pairs)
        layers = one_precision(rows.filter(c.layer.is_not_null()))
        models[model, pairs] = layers, rows.join(layers, on="precision", how="semi").filter(AT_ITS_END)
    lines = {
        f"{recipe}, {pooling}": (c.recipe == recipe) & (c.pooling == pooling)
        for recipe, pooling in (("Classical", "mean"), ("Classical", "last"), ("Echo-2", "mean"))
    }
    lines["PromptEOL"] = (c.recipe == "PromptEOL") & (c.pooling == "last")
    return panels(models, "layer", lines, {blocks.BAG: c.recipe == blocks.BAG})


def by_labels(results: Results) -> dict[str, Any]:
    models = {}
    for model, pairs in ((SMOLLM2, ENGLISH), (GEMMA, CHINESE)):
        rows = results.of("freeze", c.model == model, c.set == pairs, SPEARMAN, c.seed.is_null())
        others = results.of("scores", TRAINED, c.set == pairs, SPEARMAN, AT_ITS_END)
        models[model, pairs] = rows, others.filter(c.model.is_in([model, *REFERENCES]))
    own, cosine = c.reading == "its own similarity", c.reading == "cosine"
    lines = {
        "from a whitening, rate 1e-4: cosine": (c.method == blocks.WHITENED) & cosine,
        "from a whitening, rate 1e-3: cosine": (c.method == blocks.WHITENED_FASTER) & cosine,
        "the paper's, at a prompt's end: cosine": (c.method == blocks.LOG_VARIANCE_PROMPTED) & cosine,
        "the paper's: its own similarity": (c.method == blocks.LOG_VARIANCE) & own,
    }
    prompt = c.recipe.is_in(blocks.PROMPTEOL) & (c.pooling == "last") & (c.filter == PARTWISE)
    return panels(models, "pairs", lines, {
        "Early and late, no labels": EARLY_LATE & (c.pooling == "mean"),
        "PromptEOL, whitened, no labels": prompt,
        **{f"{name}, trained": (c.model == name) & (c.filter == "") for name in REFERENCES},
    })  # fmt: skip


#: By recipe, pooling and filter, where its name stands beside its point, in points to the right and up.
RECIPES = {
    ("Classical", "mean", ""): (7, -7), ("Classical", "last", ""): (7, 0), ("KV re-routing", "mean", ""): (-7, 0),
    ("Echo-2", "mean", ""): (2, 17), ("ReBA-2", "mean", ""): (7, 0), ("PromptEOL", "last", ""): (-7, -6),
    ("Value aggregation", "last", ""): (-7, 3), ("Pretended CoT", "last", ""): (7, -14), ("CK", "mean", ""): (7, 0),
    ("MetaEOL", "mean", ""): (-7, 0), ("Early and late", "mean", PARTWISE): (-7, 0),
    ("Topic", "last", blocks.SUM): (-7, 0), ("Echo topic", "mean", blocks.SUM): (7, 0),
}  # fmt: skip
UNIT = "Classical, mean"


def by_model(results: Results) -> dict[str, Any]:
    """Of each set, by who reads it: [score, low, high]."""
    rows, found = blocks.first_rows(results), {}
    for title in ("mean, English", "STS-B en, Spearman", "mean, Chinese"):
        own = rows.filter(c.set == blocks.HELD_OUT[title]).sort("at", maintain_order=True)
        found[title] = {label: [*scores] for label, *scores in own.select("label", "score", "low", "high").iter_rows()}
    return found if all(found.values()) else {}


def with_interval(fractions: list[float]) -> tuple[float, list[list[float]]]:
    """A score x 100, and how far its interval reaches below and above it."""
    score, low, high = (100 * value for value in fractions)
    return score, [[score - low], [high - score]]


def draw_models(figure: Any, data: dict[str, Any]) -> None:
    """A forest plot: a panel for each set, in it a line for each reader, the best first; what is trained in orange.

    What scores no better than the control without a model is shaded.
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
            score, interval = with_interval(scores[name])
            colour = COLOURS[2] if name.endswith(", trained") else COLOURS[0] if "ours" in name else GREY
            style = {"fmt": "o", "color": colour, "elinewidth": 1.8, "markersize": 5}
            axis.errorbar(score, place, xerr=interval, **style)
            beside = {"xycoords": ("axes fraction", "data"), "va": "center", "ha": "right"}
            axis.annotate(f"{score:.1f}", (1.13, place), **beside)
        axis.set_xlim(axis.get_xlim())
        for name in names:
            if name.endswith(", without a model"):
                axis.axvspan(axis.get_xlim()[0], 100 * scores[name][0], color=GREY, alpha=0.15, linewidth=0)
        axis.set_yticks(range(len(names)), names)
        axis.tick_params(axis="y", length=0)
        axis.invert_yaxis()
    figure.supxlabel("score x 100, 95% interval; shaded: no better than tf-idf", fontsize="medium")


def says_models(data: dict[str, Any]) -> str:
    parts = (
        f"{title}: {', '.join(f'{name} {100 * score:.1f}' for name, (score, *_) in scores.items())}"
        for title, scores in data.items()
    )
    return f"Scores x 100 on test parts that nothing was chosen on. {'. '.join(parts)}"


def by_cost(results: Results) -> dict[str, Any]:
    """Recipes at their own ends, by name [time, score, low, high, right, up], and levels, of one model and set."""
    timed = results.of("cost", c.table == "recipes", c.model == SMOLLM2, c.unit == UNIT)
    # Of the unit itself nothing is noted.
    times = {**dict(timed.select("contender", "value").iter_rows()), UNIT: 1.0}
    every = results.of("scores", TRAINED, c.set == ENGLISH, SPEARMAN, AT_ITS_END)
    own = one_precision(every.filter(c.model == SMOLLM2))
    names, points = [recipe for recipe, *_ in RECIPES], {}
    for (recipe, pooling, behind), place in RECIPES.items():
        found = own.filter(c.recipe == recipe, c.pooling == pooling, c.filter == behind)
        if f"{recipe}, {pooling}" in times and not found.is_empty():
            score = found.select("score", "low", "high").row(-1)
            name = recipe if names.count(recipe) == 1 else f"{recipe}, {pooling}"
            points[name] = [times[f"{recipe}, {pooling}"], *score, *place]
    plain = every.filter(c.filter == "")
    levels = {"bag of input embeddings": plain.filter(c.model == SMOLLM2, c.recipe == blocks.BAG)["score"].to_list()}
    levels |= {f"{name}, trained": plain.filter(c.model == name)["score"].to_list() for name in REFERENCES}
    found_levels = {name: scores[-1] for name, scores in levels.items() if scores}
    return {"points": points, "levels": found_levels} if len(points) > 1 else {}


def draw_costs(figure: Any, data: dict[str, Any]) -> None:
    # Narrow, so that names can be read where a page is 390 pixels wide.
    figure.set_size_inches(5.2, 4.2)
    axis = figure.subplots()
    style = {"fmt": "o", "color": COLOURS[0], "ecolor": COLOURS[1], "elinewidth": 1.2, "markersize": 5}
    for name, (cost, *fractions, right, up) in data["points"].items():
        score, interval = with_interval(fractions)
        axis.errorbar(cost, score, interval, **style)
        side = "left" if right >= 0 else "right"
        axis.annotate(name, (cost, score), (right, up), textcoords="offset points", va="center", ha=side)
    # Two of them are close: one name stands below its line.
    styles = ((GREY, 5), (COLOURS[2], -9), (COLOURS[2], 5))
    at = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
    for (colour, up), (name, level) in zip(styles, data["levels"].items(), strict=False):
        axis.axhline(100 * level, color=colour, linestyle="--", linewidth=1.2)
        axis.annotate(name, (1, 100 * level), (-2, up), color=colour, **at)
    axis.set_xscale("log", base=2)
    most = max(cost for cost, *_ in data["points"].values())
    ticks = [tick for tick in (0.5, 1, 2, 4, 8, 16, 32) if tick <= 1.2 * most]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set(xlabel=f"time, {UNIT} = 1", ylabel="Spearman x 100")


def says_costs(data: dict[str, Any]) -> str:
    said = "; ".join(f"{name} {100 * score:.1f} at {cost:.1f}" for name, (cost, score, *_) in data["points"].items())
    return f"Spearman correlation x 100 on {ENGLISH} against time, {SMOLLM2}: {said}"


PICTURES = {
    "held-out-picture": Picture("held-out.svg", "Scores by model", by_model, says_models, draw_models),
    "layers-picture": Picture(
        "layers.svg", "Score by layer", by_layer, lambda data: f"Spearman correlation by layer: {'; '.join(data)}",
        partial(draw_panels, label="layer", width=3.6, height=3.6, by_count=False),
    ),
    "freeze-picture": Picture(
        "freeze.svg", "Score by number of labels", by_labels,
        lambda data: f"Spearman correlation by number of labelled pairs: {'; '.join(data)}",
        partial(draw_panels, label="labelled pairs", width=4.4, height=4.2, by_count=True),
    ),
    "cost-picture": Picture("cost.svg", "Score against cost", by_cost, says_costs, draw_costs),
}  # fmt: skip
