"""What stands in each table of README.md, RESULTS.md and docs/: a function of the results, in Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

import polars as pl
from polars import col as c
from typer.main import get_command

import grid
import records
from grid import REFERENCES, Row, Show, cells, markdown, table
from real.endings import CHOSEN, OF_PROMPT_EOL, USUAL, WITHOUT
from st_reba.compare.results import Comparison
from st_reba.recipes import Row as Recipe
from st_reba.recipes import every_row
from st_reba.recipes.rows import IN_BRIEF
from st_reba_cli import app
from st_reba_cli.results import SCHEMAS, Layer, Probed

SMOLLM2 = "SmolLM2-135M-Instruct"
GEMMA = "Gemma 3 270M"
QWEN = "Qwen2.5-Coder-1.5B-Instruct"
ENGLISH, CHINESE = "STS-B en test", "STS-B zh test"
PAIRS = (ENGLISH, CHINESE)
WORD_SETS = ("SLPWC", "WSD")
WORDS = ("accuracy, Euclidean", "accuracy, cosine")
TITLES = ("TNews", "THUCNews")
BAG = "Bag of input embeddings"
PROMPTEOL = ["PromptEOL", "PromptEOL, Chinese"]
CONTROLS = (BAG, "tf-idf", "Bag of random embeddings")
#: What stands behind the pooling.
PARTWISE, SUM = "partwise whitened", "standardised sum"
FILTERS = ("centred", "standardised", "filtered", "whitened", "all but the top", PARTWISE, SUM)
#: The methods of FREEZE's paper's table.
PAPERS_ROWS = (
    "MLP on cosines", "siamese", "autoencoder", "autoencoder, log-variance",
    "autoencoder, log-variance, the paper's head",
)  # fmt: skip
#: The sets of held_out.csv, and what its recipes are compared with.
HELD_OUT = {
    "STS-B en, Spearman": ENGLISH,
    "Banking77, accuracy": "Banking77 test",
    "StackOverflow, accuracy": "StackOverflow test",
    "mean, English": f"mean of {ENGLISH}, Banking77 test, StackOverflow test",
    "STS-B zh, Spearman": CHINESE,
    "TNews, accuracy": "TNews test",
    "mean, Chinese": f"mean of {CHINESE}, TNews test",
}
#: What recipes are fitted on in fitted.csv, besides the other half.
FITTED_ON = (
    "the package's sentences", "another set", *(f"{count} training texts" for count in ("50", "100", "200", "1,000")),
)  # fmt: skip
#: The sets of label_free.csv.
LABEL_FREE = ("STS-B en", "Banking77 test", "StackOverflow test")
#: What an aspect does: how far a reading in terms of it is ahead of the same in terms of another.
STEERED = partial(grid.difference, value="steered", low="steered_low", high="steered_high")
#: How well labelled texts are told apart, and the sets; their mean is over all of them.
NEAREST = "accuracy of 5 neighbours"
TOLD_APART = (NEAREST, "accuracy of logistic regression", "V-measure of k-means")
LABELLED = ("Banking77", "CLINC150", "HWU64", "StackOverflow", "TREC", "TNews")
OF_ALL_LABELLED = c.set.str.ends_with(" labelled sets")
#: What the first tables show of held_out.csv.
FIRST = c.metric.is_in(["Spearman", NEAREST, "mean"])
OTHERS = (
    "all-MiniLM-L6-v2", "all-mpnet-base-v2", "m3e-small", "tf-idf", "tf-idf of characters", "early-late", "prompteol",
    "topic",
)  # fmt: skip
#: The layers and the width that were best on the development pairs of both models, with the rate of each.
WHITENED, WHITENED_FASTER = "whitened, prompt, last, 256, 0.0001", "whitened, prompt, last, 256, 0.001"
#: The paper's method, read where it reads and at the end of a prompt.
LOG_VARIANCE, LOG_VARIANCE_PROMPTED = "autoencoder, log-variance", "autoencoder, log-variance, prompt"

SPEARMAN = c.metric == "Spearman"
TRAINED, RANDOM = c.weights == "trained", c.weights == "random"
AT_ITS_END = c.layer.is_null() & (c.filter == "")
EARLY_LATE = (c.recipe == "Early and late") & (c.filter == PARTWISE)
#: With what belongs to the recipe, and nothing more.
OWN_END = c.layer.is_null() & ((c.filter == "") | EARLY_LATE | (c.filter == SUM))
IS_CONTROL = c.recipe.is_in(CONTROLS)
#: How a model is read.
READ = ("recipe", "pooling", "layer", "filter")


class Results:
    """The files of results, each read once."""

    def __init__(self, directory: Path = records.RESULTS) -> None:
        self.directory = directory
        self._read = cache(partial(records.read, directory=directory))

    def of(self, name: str, *where: pl.Expr) -> pl.DataFrame:
        """The rows of a file that fit; ``at`` is their place in it.

        Raises:
            RecordsError: If the file is missing or cannot be read.
        """
        return self._read(name).with_row_index("at").filter(*where)


Block = Callable[[Results, Path], str]
BLOCKS: dict[str, Block] = {}


def block(name: str) -> Callable[[Block], Block]:
    """What stands in the table of this name; empty where nothing was measured."""

    def add(function: Block) -> Block:
        BLOCKS[name] = function
        return function

    return add


def one_precision(rows: pl.DataFrame) -> pl.DataFrame:
    """Those of each model in the precision that most of them have, so that none is ahead by its rounding."""
    count = rows.group_by("model", "precision").len()
    # Of as many in both, float32.
    chosen = count.sort("len", "precision").unique("model", keep="last")
    return rows.join(chosen, on=["model", "precision"], how="semi", maintain_order="left")


def best(
    title: str, rows: pl.DataFrame, chosen_on: pl.DataFrame, of: Sequence[str], *shown: str, bold: str = ""
) -> pl.DataFrame:
    """A column of what scores highest on other rows, for each combination of the fields ``of``; cells say by which of
    the fields ``shown`` it was chosen."""
    high = chosen_on.drop_nulls("score").sort("score", descending=True, maintain_order=True)
    high = high.unique(of, keep="first", maintain_order=True).select({*of, *READ})

    def show(row: Row) -> str:
        said = [f"layer {row[name]}" if name == "layer" else row[name] for name in shown if row[name] not in ("", None)]
        return f"{grid.score(row)} ({', '.join(said) or 'own end'})"

    found = rows.join(high, on=high.columns, nulls_equal=True, how="semi", maintain_order="left")
    return cells(found, title, show, bold)


def labelled(rows: pl.DataFrame, named: Mapping[str, pl.Expr]) -> pl.DataFrame:
    """Rows with a name of their own in the field ``label``, in this order."""
    parts = [
        rows.filter(where).with_columns(label=pl.lit(title), at=pl.lit(place, pl.UInt32))
        for place, (title, where) in enumerate(named.items())
    ]
    return pl.concat(parts)


class Shown(NamedTuple):
    """What the cells of a column show, of which rows, and the field of which the highest value stands out."""

    show: Show = grid.score
    where: pl.Expr = pl.lit(True)
    bold: str = ""


def columns(rows: pl.DataFrame, titles: Mapping[str, Shown]) -> list[pl.DataFrame]:
    """Columns by title; a title with ``{name}`` makes several."""
    return [cells(rows.filter(own.where), title, own.show, own.bold) for title, own in titles.items()]


def alike(named: Mapping[str, pl.Expr], show: Show = grid.score, bold: str = "") -> dict[str, Shown]:
    """Columns that show the same of other rows."""
    return {title: Shown(show, where, bold) for title, where in named.items()}


def of_file(
    name: str,
    titles: Mapping[str, Shown],
    labels: Mapping[str, str],
    *where: pl.Expr,
    split: Sequence[str] = ("model", "set"),
    caption: Sequence[str] = ("precision", "date"),
    references: bool = False,
) -> Block:
    """The table of some rows of a file: see :func:`grid.table`."""

    def made(results: Results, page: Path) -> str:
        return table(columns(results.of(name, *where), titles), labels, split, caption, references)

    return made


def is_set(names: Mapping[str, str] | Sequence[str]) -> dict[str, pl.Expr]:
    """A column for each set, by its own name or by another."""
    named = names if isinstance(names, Mapping) else dict(zip(names, names, strict=True))
    return {title: c.set == name for title, name in named.items()}


def fields(*names: str) -> dict[str, str]:
    """Labels that are the values of fields, below their names."""
    return {name: f"{{{name}}}" for name in names}


RECIPES = fields("recipe", "pooling")


def recipes(rows: Sequence[Recipe], link: str = "") -> str:
    """A table with a line for each recipe.

    Args:
        rows: Which.
        link: What stands before a page's name where the recipes' names are links to their pages.
    """
    lines = [["recipe", "`--recipe`", "pooling", "what is read", "passes"]]
    for row in rows:
        name = f"[{row.name}]({link}{row.page}.md)" if link else row.name
        lines.append([name, f"`{row.key}`", ", ".join(row.poolings), row.says, row.cost])
    return markdown(lines) if rows else ""


@block("recipes")
def _(results: Results, page: Path) -> str:
    return recipes([row for row in every_row() if row.page == page.stem])


@block("json")
def _(results: Results, page: Path) -> str:
    """What ``--json`` prints, by schema; what ``compare`` and ``search`` print is a :class:`Comparison`."""
    parts = []
    schemas = {f"`st-reba/{name}/1`": model for name, model in SCHEMAS.items()}
    schemas |= {"each of `rows`, in verify": Probed, "each of `layers`": Layer}
    for title, model in schemas.items():
        lines = [["field", "type", "what it is"]]
        for field, said in model.model_fields.items():
            kind = inspect.formatannotation(said.annotation).replace("st_reba_cli.results.", "")
            lines.append([f"`{field}`", f"`{kind}`", str(said.description)])
        parts.append(f"**{title}**\n\n{markdown(lines)}")
    lines = [["field", "what it is"]]
    attributes = inspect.getdoc(Comparison).partition("Attributes:\n")[2]  # type: ignore[union-attr]
    for name, told in re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", attributes, re.DOTALL | re.MULTILINE):
        lines.append([f"`{name}`", " ".join(told.split())])
    parts.append(f"**`st-reba/compare/1`, `st-reba/search/1`**\n\n{markdown(lines)}")
    return "\n\n".join(parts)


@block("command-reference")
def _(results: Results, page: Path) -> str:
    """Each command, as its own ``--help-all`` tells it."""
    group = get_command(app)
    parts = []
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        context = command.make_context(f"st-reba {name}", [], resilient_parsing=True)
        told = " ".join((command.help or "").replace("\b", "").split())
        lines = [f"### st-reba {name}", "", told, "", "```text", command.get_usage(context), "```", ""]
        for parameter in command.params:
            parameter.hidden = False
            record = parameter.get_help_record(context)
            if record is not None and "--help" not in parameter.opts:
                lines.append(f"- `{record[0]}`: {' '.join(record[1].split())}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


@block("methods")
def _(results: Results, page: Path) -> str:
    """A line for each method, with a sentence that may name the row before."""
    named = {row.key: row for row in every_row()}
    where = "docs/methods/" if page.name == "README.md" else "methods/"
    lines = [["method", "what it does", "passes"]]
    for key, says in IN_BRIEF.items():
        row = named[key]
        lines.append([f"[{row.name}]({where}{row.page}.md)", says, row.cost.replace("prompts", "").strip()])
    return markdown(lines)


@block("worth-trying")
def _(results: Results, page: Path) -> str:
    return recipes([row for row in every_row() if row.tried])


#: What README's first table and picture show of held_out.csv. What needs no language model was scored beside each of
#: them, on the same items; tf-idf is of SmolLM2's tokens, in Chinese of characters, where it is best.
FIRST_ROWS = {
    "Echo topic, ours, on Qwen2.5-Coder-1.5B": (c.recipe == "echo-topic") & (c.model == QWEN),
    "Echo topic, ours, on Gemma 3 270M": (c.recipe == "echo-topic") & (c.model == GEMMA),
    "Echo topic, ours, on SmolLM2-135M": (c.recipe == "echo-topic") & (c.model == SMOLLM2),
    "Topic, ours, at half the cost, on SmolLM2-135M": (c.recipe == "topic") & (c.model == SMOLLM2),
    "PromptEOL, on SmolLM2-135M": (c.recipe == "prompteol") & (c.model == SMOLLM2),
    "tf-idf, without a model": (c.model == SMOLLM2) & (c.recipe == "tf-idf") | (c.recipe == "tf-idf of characters"),
    **{f"{name}, trained": (c.recipe == name) & (c.model == GEMMA) for name in REFERENCES},
}  # fmt: skip


def first_rows(results: Results) -> pl.DataFrame:
    """Those of held_out.csv, by their titles."""
    return labelled(results.of("held_out", c.against == "", FIRST), FIRST_ROWS)


@block("first-screen")
def _(results: Results, page: Path) -> str:
    # Intervals are in the picture above it.
    return table(columns(first_rows(results), alike(is_set(HELD_OUT), grid.alone)), {"read by": "{label}"})


def all_recipes(results: Results, page: Path, where: pl.Expr, split: Sequence[str] = ()) -> str:
    """Every recipe at its own end, behind nothing and behind each filter."""
    rows = one_precision(results.of("scores", where, c.layer.is_null()))
    # In the order of trained weights.
    rows = rows.sort("weights", descending=True, maintain_order=True).drop("at").with_row_index("at")
    trained = rows.filter(TRAINED)
    own = trained.filter(c.filter == "")
    made = [
        cells(own, "as it is", bold="score"),
        cells(rows.filter(RANDOM, c.filter == ""), "random weights", grid.alone),
        cells(own, "beyond overlap", grid.beyond_overlap, bold="beyond_overlap"),
        *(cells(trained.filter(c.filter == name), name, bold="score") for name in FILTERS),
    ]
    return table(made, RECIPES, ("model", *split), references=True)


def best_layers(results: Results, page: Path, pairs: str) -> str:
    """Every recipe where it is best on the development part, read on the test part."""
    rows = one_precision(results.of("scores", TRAINED, SPEARMAN, c.set == pairs))
    dev = results.of("scores", TRAINED, SPEARMAN, c.set == pairs.replace("test", "dev"))
    dev = dev.join(rows, on=["model", "precision"], how="semi", maintain_order="left")
    of = ("model", "recipe", "pooling")
    made = [
        cells(rows.filter(AT_ITS_END), "own end", bold="score"),
        best("best layer", rows, dev.filter(c.filter == ""), of, "layer", bold="score"),
        best("best layer and filter", rows, dev, of, "layer", "filter", bold="score"),
    ]
    # Of what was read at its own end alone, there is nothing to choose.
    by_layer = rows.filter(c.layer.is_not_null())
    made = [each.join(by_layer, on=of, how="semi", maintain_order="left") for each in made]
    return table(made, RECIPES, ("model",))


BLOCKS |= {
    "recipes-stsb-en": partial(all_recipes, where=SPEARMAN & (c.set == ENGLISH)),
    "recipes-stsb-en-some": partial(all_recipes, where=SPEARMAN & (c.set == f"{ENGLISH}, 100 pairs")),
    "recipes-stsb-zh": partial(all_recipes, where=SPEARMAN & (c.set == CHINESE)),
    "titles": partial(all_recipes, where=c.set.is_in(TITLES), split=["set", "metric"]),
    "layers-stsb-en": partial(best_layers, pairs=ENGLISH),
    "layers-stsb-zh": partial(best_layers, pairs=CHINESE),
}


@block("word-sense")
def _(results: Results, page: Path) -> str:
    rows = one_precision(results.of("scores", c.metric.is_in(WORDS), c.filter == ""))
    made = []
    for metric in WORDS:
        own = rows.filter(c.metric == metric)
        at_end, layers = own.filter(c.layer.is_null()), own.filter(TRAINED, c.layer.is_not_null())
        made += [
            cells(at_end.filter(TRAINED), metric.removeprefix("accuracy, "), bold="score"),
            cells(at_end.filter(RANDOM), "random weights", grid.alone),
            best("its best layer", layers, layers, ("model", "set", "recipe", "pooling"), "layer", bold="score"),
        ]
    return table(made, RECIPES, ("model", "set"))


@block("claims")
def _(results: Results, page: Path) -> str:
    made = cells(one_precision(results.of("claims")), "{set}", grid.difference)
    return table([made], {"claim": "{claim}", "difference": "{first} − {second}"}, ("model",))


@block("tried")
def _(results: Results, page: Path) -> str:
    rows = results.of("ablations", c.recipe == "Echo topic")
    made = []
    for model in (SMOLLM2, GEMMA):
        own = rows.filter(c.model == model)
        made += [cells(own, model, grid.alone), cells(own, "ahead of it as it is", grid.difference)]
    return table(made, {"changed": "{change}"}, ("set",))


def quartiles(row: Row) -> str:
    return grid.fraction(row, "median", "low", "high")


@block("precision")
def _(results: Results, page: Path) -> str:
    split = ("model", "set", "metric")
    rows = results.of("scores", TRAINED, AT_ITS_END, c.set.is_in([*PAIRS, *WORD_SETS, *TITLES]))
    rows = rows.filter(c.precision.n_unique().over(split) == 2)
    rows = rows.filter((c.precision == "float32").any().over(*split, "recipe", "pooling"))
    named = {name: c.precision == name for name in ("float32", "bfloat16")}
    return table(columns(rows, alike(named)), RECIPES, split, ("date",))


@block("choose-best")
def _(results: Results, page: Path) -> str:
    lines = {
        **{f"{pairs}, Spearman": (c.set == pairs) & SPEARMAN for pairs in PAIRS},
        **{f"{name}, accuracy, cosine": (c.set == name) & (c.metric == WORDS[1]) for name in WORD_SETS},
        **{name: c.set == name for name in TITLES},
    }
    rows = one_precision(results.of("scores", TRAINED))
    own, other = rows.filter(~c.model.is_in(REFERENCES)), rows.filter(c.model.is_in(REFERENCES), AT_ITS_END)
    # What is chosen is chosen on the development part, where there is one.
    dev = own.filter(c.set.str.ends_with(" dev")).with_columns(set=c.set.str.replace(" dev", " test"))
    chosen_on, own = (labelled(each, lines) for each in (pl.concat([dev, own.filter(~c.set.is_in(PAIRS))]), own))
    # The others stand in the table of each model that was measured on the same texts.
    models = own.select("model", "set").unique(maintain_order=True).rename({"model": "beside"})
    other = labelled(other.join(models, on="set", maintain_order="left_right"), lines)
    ends, of = own.filter(AT_ITS_END), ("model", "label")
    authors, controls = chosen_on.filter(AT_ITS_END, ~IS_CONTROL), chosen_on.filter(IS_CONTROL)
    classical = ends.filter(c.recipe == "Classical")
    made = [
        cells(classical.filter(c.pooling.is_in(["mean", ""])), "Classical, mean"),
        cells(classical.filter(c.pooling == "last"), "Classical, last"),
        cells(own.filter(c.recipe == "Echo topic", OWN_END), "Echo topic"),
        best("best recipe, as its authors read it", own, authors, of, "recipe", "pooling"),
        best("best recipe, layer and filter", own, chosen_on.filter(~IS_CONTROL), of, *READ),
        best("best control", own, controls, of, *READ),
        *(
            cells(other.filter(c.model == name).with_columns(model=c.beside).drop("beside"), name)
            for name in REFERENCES
        ),
    ]
    return table(made, {"texts": "{label}"}, ("model",))


def with_titles(rows: pl.DataFrame, bold: str, show: Show = grid.score) -> list[pl.DataFrame]:
    """Columns of the pairs and of the titles."""
    pairs = rows.filter(SPEARMAN)
    sets = (alike(is_set(some), show, bold) for some in (PAIRS, TITLES))
    return [*columns(pairs, next(sets)), *columns(rows, next(sets))]


@block("choose-recipes")
def _(results: Results, page: Path) -> str:
    rows = one_precision(results.of("scores", TRAINED, OWN_END))
    recipes = rows.filter(c.set.is_in([*PAIRS, *TITLES])).select("model", "recipe", "pooling", "at")
    recipes = recipes.unique(["model", "recipe", "pooling"], keep="first", maintain_order=True)
    # Word embeddings do not depend on the pooling.
    words = rows.filter(c.metric == WORDS[1], c.pooling.is_in(["", "mean"])).drop("pooling", "at")
    words = recipes.join(words, on=["model", "recipe"], maintain_order="left_right").select(rows.columns)
    shown = with_titles(rows, bold="score", show=grid.alone)
    return table(
        [*shown[:2], *columns(words, alike(is_set(WORD_SETS), grid.alone, bold="score")), *shown[2:]],
        RECIPES,
        ("model",),
        references=True,
    )


@block("filters")
def _(results: Results, page: Path) -> str:
    rows = results.of("scores", TRAINED, SPEARMAN, c.set.is_in(PAIRS), c.layer.is_null())
    named = {
        "Classical, mean": (c.recipe == "Classical") & (c.pooling == "mean"),
        "Classical, last": (c.recipe == "Classical") & (c.pooling == "last"),
        "Echo-2, mean": (c.recipe == "Echo-2") & (c.pooling == "mean"),
        "PromptEOL": c.recipe.is_in(PROMPTEOL),
        "bag of input embeddings": c.recipe == BAG,
    }
    made = columns(one_precision(rows), alike(named, bold="score"))
    return table(made, {"behind the pooling": "{filter}"}, ("model", "set"))


@block("scores-of-the-page")
def _(results: Results, page: Path) -> str:
    names = [row.name for row in every_row() if row.page == page.stem]
    rows = results.of("scores", TRAINED, OWN_END, c.recipe.is_in(["Classical", *names]))
    if rows.filter(c.recipe.is_in(names)).is_empty():
        return ""
    return table(with_titles(one_precision(rows), bold="score"), RECIPES, ("model",))


@block("early-late")
def _(results: Results, page: Path) -> str:
    at_end = c.filter == ""
    named = {
        "Early and late": EARLY_LATE & (c.pooling == "mean"),
        "PromptEOL, last": (c.recipe == "PromptEOL") & (c.pooling == "last") & at_end,
        "PromptEOL, last, whitened alike": (c.recipe == "PromptEOL") & (c.pooling == "last") & (c.filter == PARTWISE),
        "bag of input embeddings, whitened alike": (c.recipe == BAG) & (c.filter == PARTWISE),
        "Classical, mean": (c.recipe == "Classical") & (c.pooling == "mean") & at_end,
        "Classical, last": (c.recipe == "Classical") & (c.pooling == "last") & at_end,
    }
    rows = labelled(one_precision(results.of("scores", TRAINED, c.layer.is_null())), named)
    return table(with_titles(rows, bold="score"), {"recipe": "{label}"}, ("model",))


OWN, COSINE = c.reading == "its own similarity", (c.reading == "cosine") & SPEARMAN
OF_THE_PAPER, ALL_PAIRS = c.method.is_in(PAPERS_ROWS), c.pairs > 1000
DRAWN = c.method.is_in([LOG_VARIANCE, LOG_VARIANCE_PROMPTED, WHITENED, WHITENED_FASTER])
LAYERS = fields("layers", "width", "dimensions", "rate")


def trained_on_states(where: pl.Expr, labels: Mapping[str, str], metrics: Sequence[str] = ("Spearman",)) -> Block:
    """FREEZE's methods: means over the seeds, by the trained similarity and by what a vector store sees."""
    named = {f"{metric} of its own similarity": OWN & (c.metric == metric) for metric in metrics}
    titles = alike({**named, "Spearman of the cosine": COSINE}, bold="score")
    titles["ahead of Early and late"] = Shown(grid.ahead, COSINE)
    which, caption = (where, c.seed.is_null(), c.set.is_in(PAIRS)), ("precision", "pairs", "date")
    return of_file("freeze", titles, labels, *which, caption=caption)


READ_BY, AHEAD_OF = {"read by": "{recipe}"}, {"read by": "{recipe}", "ahead of": "{against}"}
ALONE, TOPICS = c.against == "", c.recipe.is_in(["echo-topic", "topic"])
OF_LABELLED = {name: f"{name} test" for name in LABELLED}
WHEN = ("date", "machine", "versions")

BLOCKS |= {
    "ablations": of_file(
        "ablations", {"score": Shown(grid.alone), "ahead of PromptEOL": Shown(grid.difference)},
        fields("recipe", "change"), c.recipe != "Echo topic",
    ),
    "dependency": of_file(
        "dependency", alike({"median, and quartiles": TRAINED, "random weights": RANDOM}, quartiles), fields("recipe"),
        c.layer.is_null(),
    ),
    "dependency-layers": of_file(
        "dependency", {"median, and quartiles": Shown(quartiles)}, {"after layer": "{layer}"}, TRAINED,
        c.recipe == "Classical", c.layer % 5 == 0,
    ),
    "retrieval": of_file(
        "retrieval", {
            **alike({metric: c.metric == metric for metric in ("nDCG@10", "recall@100")}, bold="score"),
            "processor seconds for 1,000": Shown(grid.number("seconds"), c.metric == "nDCG@10"),
        },
        fields("recipe", "pooling", "filter"), c.set.str.ends_with(" test"), split=("set", "model"), references=True,
        caption=("precision", "max_tokens", "queries", "documents", "machine", "date"),
    ),
    "static": of_file(
        "static", {
            "Spearman x 100": Shown(bold="score"),
            "texts a second of one thread": Shown(grid.number("speed")),
            "MiB of weights": Shown(grid.number("size")),
        },
        {"recipe": "{recipe}", "tokens read after layer": "{layer}", **fields("dimensions", "precision")},
        caption=("machine", "date"),
    ),
    "static-beside": of_file(
        "static_beside", {"score": Shown(bold="score"), "ahead of model2vec": Shown(grid.ahead)},
        {"recipe": "{recipe}", "fitted on": "{fitted_on}", **fields("dimensions")}, split=("set", "metric"),
        caption=("model", "precision", "texts", "date"),
    ),
    "rerank": of_file(
        "rerank", {
            "nDCG@10": Shown(bold="score"), "ahead of BM25": Shown(grid.ahead),
            "processor seconds a query": Shown(grid.number("seconds", ",.1f")),
        },
        {"reading": "{reading}", "first": "{depth}", "attention of": "{counted}", "which": "{layers}"},
        split=("model", "set", "queries"), caption=("precision", "max_tokens", "documents", "machine", "date"),
    ),
    "engines": of_file(
        "engines", {
            "lowest cosine": Shown(grid.number("value", ".6f"), c.quantity == "lowest cosine"),
            "short texts a second": Shown(grid.number("value", ",.1f"), c.quantity == "short"),
            "long texts a second": Shown(grid.number("value", ",.2f"), c.quantity == "long"),
        },
        {"backend": "{engine}"}, split=("model", "recipe"), caption=("date", "versions"),
    ),
    "measured": of_file(
        "scores", {"last measured": Shown(lambda row: row["date"])}, fields("model", "precision", "versions"),
        split=(), caption=(),
    ),
    "freeze-paper": trained_on_states(OF_THE_PAPER & ALL_PAIRS, fields("method"), ["Pearson", "Spearman"]),
    "freeze-ahead": trained_on_states(~OF_THE_PAPER & ALL_PAIRS, {**fields("method"), **LAYERS}),
    "freeze-few": trained_on_states(DRAWN, {"method": "{method}", "labelled pairs": "{pairs}"}),
    "freeze-choice": of_file(
        "freeze", alike({"Spearman of the cosine": COSINE, "Spearman of its own similarity": OWN}, grid.alone, "score"),
        LAYERS, c.seed == 0, c.set.is_in(["STS-B en dev", "STS-B zh dev"]), c.pairs == 1000, SPEARMAN,
        c.method.str.starts_with("whitened"), caption=("pairs", "date"),
    ),
    "held-out": of_file(
        "held_out", alike(is_set(HELD_OUT), bold="score"), READ_BY, ALONE, FIRST, split=["model"]
    ),
    "held-out-ahead": of_file(
        "held_out", alike(is_set(HELD_OUT), grid.ahead), AHEAD_OF, TOPICS, c.against.is_in(OTHERS), FIRST,
        split=["model"],
    ),
    "held-out-labelled": of_file(
        "held_out", alike({**is_set(OF_LABELLED), "mean, English": OF_ALL_LABELLED}, bold="score"), READ_BY, ALONE,
        c.metric.is_in(TOLD_APART), split=("model", "metric"),
    ),
    "held-out-labelled-ahead": of_file(
        "held_out", alike({metric: c.metric == metric for metric in TOLD_APART}, grid.ahead), AHEAD_OF, TOPICS,
        OF_ALL_LABELLED, ~c.against.is_in(["", "echo-topic"]), split=["model"],
    ),
    "topic-and-means": of_file(
        "held_out", alike(is_set({"STS-B en": ENGLISH, **OF_LABELLED, "STS-B zh": CHINESE}), grid.ahead),
        fields("model", "metric"), c.recipe == "echo-topic", c.against == "echo-means",
        c.metric.is_in(["Spearman", *TOLD_APART]), split=(),
    ),
    "several-endings": of_file(
        "several", {
            "mean": Shown(where=ALONE),
            **alike({f"ahead of {name} alone": c.against == name for name in ("topic", "domain")}, grid.ahead),
        },
        {"copies": "{copies}", "asked for": "{recipe}"}, c.set == "mean", split=(),
        caption=("model", "precision", "texts", "date"),
    ),
    "distil": of_file(
        "distil", {
            "Spearman x 100": Shown(bold="score"),
            "share of the teacher's, %": Shown(lambda row: grid.fraction(row, "share", "share_low", "share_high")),
            "held-out texts: order of cosines": Shown(lambda row: grid.percent(row["agreement"])),
            "held-out texts: nearest ten": Shown(lambda row: grid.percent(row["neighbours"])),
            "processor seconds": Shown(grid.number("seconds")),
        },
        fields("student", "dimensions"), c.set == ENGLISH, split=("model", "set", "corpus"),
        caption=("precision", "texts", "date"),
    ),
    "bellm": of_file(
        "bellm", {
            "Spearman x 100": Shown(bold="score"),
            "ahead of no layer turned": Shown(grid.ahead),
            "trainings": Shown(grid.number("seeds")),
            "compared": Shown(grid.number("ahead_seeds")),
        },
        {**fields("method", "turned"), "read": "{reading}", **fields("precision")}, c.seed.is_null(),
        split=("model", "set", "triplets"), caption=["date"],
    ),
    "jtcse": of_file(
        "jtcse", {"Spearman x 100": Shown(), "ahead of SimCSE": Shown(grid.ahead)},
        {"trained further by": "{method}", "steps": "{steps}"}, c.seed.is_null(), c.set == ENGLISH, split=(),
        caption=("model", "set", "precision", "texts", "date"),
    ),
    "sinks": of_file(
        "sinks", {
            "score": Shown(where=ALONE & TRAINED),
            "ahead of it as it is": Shown(grid.ahead, (c.against == "as it is") & TRAINED),
            "ahead of both ways": Shown(grid.ahead, (c.against == "both ways") & TRAINED),
            "random weights: ahead of it as it is": Shown(grid.ahead, (c.against == "as it is") & RANDOM),
        },
        fields("recipe", "pooling", "change", "layers"), c.chosen_on != "", split=("model", "set", "metric"),
        caption=("precision", "texts", "date"),
    ),
    "heads": of_file(
        "heads", {"score": Shown(), "ahead of all heads": Shown(grid.ahead)},
        {"weights of": "{subset}", "heads": "{heads}", "chosen on": "{chosen_on}"},
        ~c.subset.str.contains(r"^(without )?(head|layer) \d"), c.metric != "accuracy, Euclidean",
        split=("model", "set", "metric"),
        caption=("precision", "texts", "date"),
    ),
    "aspects": of_file(
        "aspects",
        {"score": Shown(), "ahead of no aspect": Shown(grid.ahead), "ahead of the other aspect": Shown(STEERED)},
        fields("model", "recipe"), (c.aspect == "") | (c.aspect == c.kind), split=("set", "kind", "metric"),
        caption=("precision", "texts", "date"),
    ),
    "install-size": of_file(
        "install", {"packages": Shown(grid.number("packages")), "MB": Shown(grid.number("megabytes", ",.1f"))},
        {"": "{part}"}, split=("system", "python"), caption=("date", "versions"),
    ),
    "batches": of_file(
        "batches", {"{precision}": Shown(grid.number("distance", ".1e"))}, fields("module"), split=["model"],
        caption=WHEN,
    ),
    "loaded": of_file(
        "loaded", {"{model}": Shown(grid.number("value", ",.3g"))}, {"measured": "{quantity}"}, split=["precision"],
        caption=("date", "versions"),
    ),
    "llemb": of_file(
        "llemb",
        {
            "lowest cosine": Shown(grid.number("low", ".4f")),
            "largest difference, of the largest value": Shown(grid.number("distance", ".1e")),
        },
        {"llemb reads": "{read}", "llemb ran": "{beside}"}, split=["model"], caption=("texts", "date", "versions"),
    ),
    "llama-cpp": of_file(
        "llama_cpp", {"{contender}": Shown(grid.number("value", ",.4g"))}, fields("quantity", "set", "threads"),
        ~c.quantity.str.contains("cosine|our calls"), split=["model"], caption=WHEN,
    ),
    "llama-cpp-cosines": of_file(
        "llama_cpp",
        {"median": Shown(grid.number("value", ".4f")), "lowest": Shown(grid.number("low", ".4f"))},
        {**fields("model"), "recipe": "{contender}", **fields("texts")},
        c.quantity.str.contains("cosine"), split=(), caption=("date", "versions"),
    ),
    "label-free-layers": of_file(
        "label_free", alike(is_set(LABEL_FREE), grid.ahead), {"layer chosen by": "{number}"}, c.question == "layer",
        split=(), caption=("precision", "texts", "date"),
    ),
    "label-free-ranks": of_file(
        "label_free", alike(is_set(LABEL_FREE)), fields("number"), c.question != "layer", split=["question"],
        caption=("precision", "readings", "date"),
    ),
    "serving": of_file(
        "serving", {"{quantity}": Shown(grid.number("value", ",.4g"))}, fields("clients"), split=["model"],
        caption=WHEN,
    ),
}  # fmt: skip


@block("heads-layers")
def _(results: Results, page: Path) -> str:
    """Each layer alone and left out."""
    rows = results.of("heads", c.subset.str.contains(r"^(without )?layer \d"), c.metric != "accuracy, Euclidean")
    rows = rows.with_columns(layer=c.subset.str.extract(r"(\d+)$").cast(pl.Int64)).sort(
        "model", "set", "metric", "layer"
    )
    rows = rows.drop("at").with_row_index("at")
    titles = {
        "its heads alone": Shown(where=~c.subset.str.starts_with("without")),
        "all but its heads: ahead of all": Shown(grid.ahead, c.subset.str.starts_with("without")),
    }
    return table(columns(rows, titles), fields("layer"), ("model", "set", "metric"), ("precision", "texts", "date"))


@block("compared-sure")
def _(results: Results, page: Path) -> str:
    """On how many sets each version is surely ahead, and what it took."""
    rows = results.of("compared")
    # Sets that both versions have.
    both = rows.group_by("set").agg(c.version.n_unique().alias("versions of it"))
    rows = rows.join(both.filter(pl.col("versions of it") == rows["version"].n_unique()), on="set")
    counted = rows.group_by("version", maintain_order=True).agg(
        pl.len().alias("sets"),
        (c.advised != "").sum().alias("a recipe is advised"),
        (c.control_low > 0).sum().alias("surely ahead of every control"),
        (c.plain_low > 0).sum().alias("surely ahead of the plain embedding"),
        (100 * c.score.mean()).round(1).alias("mean score"),
        c.seconds.median().round().cast(pl.Int64).alias("seconds of the processor, median"),
    )
    return markdown([counted.columns, *(list(map(str, row)) for row in counted.rows())])


@block("compared")
def _(results: Results, page: Path) -> str:
    rows = results.of("compared")
    # The versions of a set stand together.
    rows = rows.sort(c.at.min().over("set"), "at").drop("at").with_row_index("at")
    ahead = partial(grid.difference, value="control_ahead", low="control_low", high="control_high")
    titles = {
        "best": Shown(lambda row: str(row["best"])), "read": Shown(lambda row: str(row["read_at"])), "score": Shown(),
        "ahead of the strongest control": Shown(ahead), "which": Shown(lambda row: str(row["control"])),
    }  # fmt: skip
    return table(columns(rows, titles), fields("set", "version"), ["model"], ("date",))


@block("fitted")
def _(results: Results, page: Path) -> str:
    rows = results.of("fitted")
    mean = c.set == "mean"
    rows = rows.sort(mean, maintain_order=True).drop("at").with_row_index("at")
    rows = rows.with_columns(label=pl.when(mean).then(pl.format("mean of {} sets", c.sets)).otherwise(c.set))
    others = alike({title: c.fitted_on == title for title in FITTED_ON}, grid.ahead)
    made = [cells(rows.filter(c.ahead.is_null()), "{fitted_on}"), *columns(rows, others)]
    return table(made, {"set": "{label}"}, ("model", "recipe"))


def spread(
    rows: pl.DataFrame,
    setting: Sequence[str],
    by: str,
    chosen: Mapping[str, str],
    compared: Mapping[str, str],
    title: str,
) -> str:
    """How much depends on the words of a prompt: for each setting two lines, of similarity and of classification.

    A wording's score is the mean over the tasks of its line.

    Args:
        rows: Of each wording and task.
        setting: The fields of which each combination has lines of its own: model and language first.
        by: The field that has the wordings.
        chosen: The wording that was chosen in each language.
        compared: The wording that it is compared with in each language.
        title: The head of that.
    """
    first = list(setting[:3])
    lines = [[*first, "wordings", "tasks (texts)", "lowest", "quartiles", "best", "chosen", title, "the best is"]]
    kind = c.task.str.starts_with("STS-B").alias("kind")
    for part in rows.with_columns(kind).partition_by([*setting, "kind"], maintain_order=True):
        means = dict(part.group_by(by, maintain_order=True).agg(c.score.mean()).iter_rows())
        high, language = max(means, key=means.__getitem__), part["language"][0]
        tasks = part.select(pl.format("{} ({})", "task", "texts")).to_series().unique(maintain_order=True)
        scores = [means[high], *(means.get(each[language]) for each in (chosen, compared))]
        lines.append([
            *(str(part[name][0]) for name in first), str(len(means)), ", ".join(tasks),
            grid.percent(min(means.values())), " / ".join(map(grid.percent, quantiles(means.values(), n=4))),
            *map(grid.percent, scores), f"`{high}`",
        ])  # fmt: skip
    return markdown(lines) if len(lines) > 1 else ""


@block("wordings")
def _(results: Results, page: Path) -> str:
    rows = results.of("wordings", c.readout == "sum")
    return spread(rows, ("model", "language", "copies", "stage"), "ending", CHOSEN, OF_PROMPT_EOL, "PromptEOL's")


@block("beginnings")
def _(results: Results, page: Path) -> str:
    return spread(results.of("beginnings"), ("model", "language"), "layout", USUAL, WITHOUT, "no words before")


RATIO = {"ratio": "{quantity}: {contender} / {unit}"}
OF_RECIPE = {"recipe": "{contender}"}
WITH_PRECISION = {**OF_RECIPE, "backbone": "{precision}"}
LENGTHS, LENGTHS_BY_BATCH = "n = {tokens}", "n = {tokens}, batch {batch}"
TIME, FLOAT32, BFLOAT16 = c.quantity == "time", c.precision == "float32", c.precision == "bfloat16"
SPEEDS = c.quantity.is_in(["tokens of text/s", "MiB of encoding"])
BY_QUANTITY = ("quantity", "model", "machine")


def of_cost(
    name: str,
    labels: Mapping[str, str],
    titles: str | Mapping[str, Shown],
    where: pl.Expr = TIME,
    split: Sequence[str] = ("model", "machine"),
) -> Block:
    """One table of cost.csv; what neither rows nor columns say stands above.

    Args:
        name: In the field ``table``.
        labels: Of the rows.
        titles: Of the columns, with the numbers of a row in ascending order; or each column by its title.
        where: Which rows.
        split: As for :func:`grid.table`.
    """

    def made(results: Results, page: Path) -> str:
        rows, used = results.of("cost", c.table == name, where), " ".join(labels.values())
        if isinstance(titles, str):
            used += titles
            if numbers := [each for each in re.findall(r"\{(\w+)\}", titles) if rows[each].dtype.is_integer()]:
                rows = rows.sort(numbers, maintain_order=True)
        said = [
            each for each in ("precision", "tokens", "batch", "how", "date", "versions") if f"{{{each}}}" not in used
        ]
        every = {titles: Shown(grid.cost)} if isinstance(titles, str) else titles
        return table(columns(rows, every), labels, split, said)

    return made


def quantities(titles: Mapping[str, str], show: Show = grid.cost) -> dict[str, Shown]:
    """Columns by title, each of a quantity."""
    return alike({title: c.quantity == quantity for title, quantity in titles.items()}, show)


BLOCKS |= {
    "cost-recipes": of_cost("recipes", RATIO, "batch {batch}"),
    "cost-plain": of_cost("plain", RATIO, "{precision}"),
    "cost-alone": of_cost("alone", {"ratio": "time: {contender} / {unit}, {precision}"}, LENGTHS_BY_BATCH),
    "cost-beside-echo": of_cost("beside-echo", RATIO, LENGTHS_BY_BATCH),
    "cost-step": of_cost("step", RATIO, "batches of {batch}"),
    "cost-aspects": of_cost("aspects", RATIO, "{tokens} tokens"),
    "cost-prefixes": of_cost("prefixes", RATIO, "batches of {batch}"),
    "cost-short": of_cost("short", RATIO, LENGTHS_BY_BATCH),
    "cost-limit": of_cost(
        "limit", {"": "{quantity}", "of Classical, mean": "{contender}"}, LENGTHS_BY_BATCH,
        where=c.quantity.str.starts_with("share of the time"),
    ),
    "cost-repetition": of_cost(
        "repetition", RATIO, LENGTHS, where=c.quantity.is_in(["time", "peak memory of the process"]) & FLOAT32
    ),
    # Where memory is a GPU's, all of them hold the same weights.
    "cost-gpu": of_cost(
        "repetition", RATIO, LENGTHS, where=c.quantity.is_in(["time", "peak memory of encoding"]) & BFLOAT16
    ),
    "cost-kernel": of_cost(
        "kernel", {"layer": "{model}", "kernel / torch's operations": "{contender}"}, LENGTHS,
        where=c.quantity == "time of the maximum in a layer", split=["machine"],
    ),
    "cost-passes": of_cost("passes", {"ratio": "{quantity}: {contender} / {unit}, batch {batch}"}, LENGTHS),
    "cost-sweep": of_cost("sweep", RATIO, LENGTHS_BY_BATCH),
    "cost-chunked": of_cost("chunked", RATIO, LENGTHS),
    "cost-towers": of_cost("towers", RATIO, "{batch} x {tokens}"),
    "speed-repetition": of_cost("repetition", OF_RECIPE, LENGTHS, where=SPEEDS, split=BY_QUANTITY),
    "speed-chunked": of_cost("chunked", OF_RECIPE, LENGTHS, where=SPEEDS, split=BY_QUANTITY),
    "speed-precision": of_cost("precision", WITH_PRECISION, {
        **quantities({"tokens of text/s": "tokens of text/s", "time / float32's": "time"}),
        **quantities(
            {"Spearman x 100": "Spearman x 100", "less that of float32": "change of Spearman x 100"}, grid.points
        ),
    }, where=pl.lit(True)),
    "speed-compiled": of_cost("compiled", WITH_PRECISION, quantities({
        "tokens of text/s": "tokens of text/s",
        "time / not compiled": "time",
        "processor seconds for the first texts": "seconds for the first texts",
    }), where=pl.lit(True)),
    "speed-encode": of_cost("encode", OF_RECIPE, quantities({
        "texts/s": "texts/s",
        "tokens of text/s": "tokens of text/s",
        "FLOP/s, as a share of a 1024 x 1024 matrix product's": "FLOP/s",
    }), where=pl.lit(True)),
    "speed-start": of_cost("start", {"": "`{contender}`"}, "processor time, ms", where=pl.lit(True), split=["machine"]),
    "speed-releases": of_cost("releases", {"": "{contender}", "beside release": "{unit}"}, "time"),
    "speed-corpus": of_cost(
        "corpus", {"": "{quantity}", "of": "{contender}", "beside": "{unit}"}, "seen", where=pl.lit(True)
    ),
    "speed-workers": of_cost("workers", {"": "{contender}"}, "two at once / one", where=pl.lit(True)),
    "speed-files": of_cost(
        "files", {"reading and writing, one process": "{contender}", "": "{how}"}, "MB/s", where=pl.lit(True),
        split=["machine"],
    ),
}  # fmt: skip


class Target(NamedTuple):
    """A goal for speed: a figure in words, with fields of its row of cost.csv; which rows; and its bounds."""

    figure: str
    where: pl.Expr
    most: float | None = None
    least: float | None = None


def of(name: str, quantity: str, contender: str = "") -> pl.Expr:
    rows = (c.table == name) & (c.quantity == quantity)
    return rows & (c.contender == contender) if contender else rows


BESIDE, ONE_TEXT = "{contender} / {unit}, n = {tokens}", "one text of {tokens} tokens: the slowest recipe"
PLAIN, MIXED = "{contender} / plain sentence-transformers", "texts of mixed lengths"
BESIDE_PLAIN = c.unit == "sentence-transformers, mean"
START = "processor time, ms"
MEMORY = "peak memory of the process, MiB"
TARGETS = (
    Target("`{contender}`: {quantity}, the slowest of those that run no model",
           of("start", START) & c.contender.str.starts_with("st-reba "), most=1000),
    Target("`{contender}`: {quantity}", of("start", START, "import st_reba after sentence_transformers"), most=300),
    Target(f"{PLAIN}, {MIXED}", of("plain", "time", "Classical, mean") & BESIDE_PLAIN, most=0.75),
    *(
        Target(f"{PLAIN}, {MIXED}", of("plain", "time", name) & BESIDE_PLAIN, most=1.6)
        for name in ("Echo-2, mean", "ReBA-2, mean", "ReBA-2, last")
    ),
    Target("a pass's matrix products, as a share of its time, n = {tokens}",
           of("limit", "share of the time"), least=0.7),
    *(
        Target(BESIDE, of("repetition", "time", name) & c.machine.str.contains("NVIDIA"), most=1.1)
        for name in ("ReBA-2, last", "ReBA-2, mean")
    ),
    Target(f"{PLAIN}, {ONE_TEXT}", of("short", "time") & BESIDE_PLAIN, most=1.5),
    Target("Spearman x 100 in bfloat16, less that in float32: {contender}, which changes most",
           of("precision", "change of Spearman x 100") & BFLOAT16, most=0.2),
    Target(BESIDE, of("passes", "time", "RT-8, last") & (c.tokens == 512), most=1.1),
    Target(BESIDE, of("repetition", "time", "ReBA-2 with all maps stored, mean") & (c.tokens == 512), least=3),
    *(Target(BESIDE, of("alone", "time") & (c.tokens == tokens)) for tokens in (12, 128)),
    Target("{contender} / {unit}", of("corpus", "time"), most=1.05),
    *(
        Target("{contender}: {quantity}", of("corpus", MEMORY, f"`st-reba encode`, {texts} texts"))
        for texts in ("20,000", "200,000")
    ),
    *(
        Target("{contender}: two at once / one, by the clock", of("workers", "speed of two", name), least=1.8)
        for name in ("bare loop over the model", "`st-reba encode`")
    ),
)  # fmt: skip


@block("speed-targets")
def targets(results: Results, page: Path, asked_for: Sequence[Target] = TARGETS) -> str:
    """Of each target and each setting that it was measured in, the row that is furthest from it, by its size."""
    setting = ("model", "precision", "machine")
    lines = [["what", "goal", "measured", "met", "measured on"]]
    for figure, where, most, least in asked_for:
        asked = "" if least is None else f"at least {least:g}"
        asked = asked if most is None else f"at most {most:g}"
        rows = results.of("cost", where, c.value.is_not_null()).with_columns(size=c.value.abs())
        for part in rows.partition_by(setting, maintain_order=True):
            row = part.sort("size", descending=least is None, maintain_order=True).row(0, named=True)
            met = (most is None or row["size"] <= most) and (least is None or row["size"] >= least)
            measured_on = ", ".join(row[name] for name in setting if row[name])
            lines.append(
                [figure.format(**row), asked, grid.cost(row), ("yes" if met else "no") if asked else "", measured_on]
            )
    return markdown(lines) if len(lines) > 1 else ""
