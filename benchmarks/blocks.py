"""What stands in each table of README.md, RESULTS.md and docs/: a function of the results, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import polars as pl
from polars import col as c

import grid
import records
from grid import REFERENCES, Row, Show, cells, markdown, table
from real.endings import BETWEEN, CHOSEN, USUAL, WHOLE_EN, WHOLE_ZH, endings
from st_reba.recipes import Row as Recipe
from st_reba.recipes import every_row

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


def columns(
    rows: pl.DataFrame, named: Mapping[str, pl.Expr], show: Show | None = None, bold: str = ""
) -> list[pl.DataFrame]:
    """Columns named by hand, that show alike."""
    return [cells(rows.filter(where), title, show, bold) for title, where in named.items()]


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
    lines = [["recipe", "`--recipe`", "module", "pooling", "what is read", "cost beside Classical"]]
    for row in rows:
        name = f"[{row.name}]({link}{row.page}.md)" if link else row.name
        lines.append([name, f"`{row.key}`", f"`{row.module.__name__}`", ", ".join(row.poolings), row.says, row.cost])
    return markdown(lines) if rows else ""


@block("recipes")
def _(results: Results, page: Path) -> str:
    return recipes([row for row in every_row() if row.page == page.stem])


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
    return table(columns(first_rows(results), is_set(HELD_OUT)), {"read by": "{label}"})


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


@block("ablations")
def _(results: Results, page: Path) -> str:
    rows = results.of("ablations", c.recipe != "Echo topic")
    made = [cells(rows, "score", grid.alone), cells(rows, "ahead of PromptEOL", grid.difference)]
    return table(made, fields("recipe", "change"), ("model", "set"))


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


@block("dependency")
def _(results: Results, page: Path) -> str:
    rows = results.of("dependency", c.layer.is_null())
    named = {"median, and quartiles": TRAINED, "random weights": RANDOM}
    return table(columns(rows, named, quartiles), fields("recipe"), ("model", "set"))


@block("dependency-layers")
def _(results: Results, page: Path) -> str:
    rows = results.of("dependency", TRAINED, c.recipe == "Classical", c.layer % 5 == 0)
    return table([cells(rows, "median, and quartiles", quartiles)], {"after layer": "{layer}"}, ("model", "set"))


@block("retrieval")
def _(results: Results, page: Path) -> str:
    rows = results.of("retrieval", c.set.str.ends_with(" test"))
    by_rank = rows.filter(c.metric == "nDCG@10")
    made = [
        cells(by_rank, "nDCG@10", bold="score"),
        cells(rows.filter(c.metric == "recall@100"), "recall@100", bold="score"),
        cells(by_rank, "processor seconds for 1,000", grid.number("seconds")),
    ]
    said = ("precision", "max_tokens", "queries", "documents", "machine", "date")
    return table(made, fields("recipe", "pooling", "filter"), ("set", "model"), said, references=True)


@block("static")
def _(results: Results, page: Path) -> str:
    rows = results.of("static")
    made = [
        cells(rows, "Spearman x 100", bold="score"),
        cells(rows, "texts a second of one thread", grid.number("speed")),
        cells(rows, "MiB of weights", grid.number("size")),
    ]
    labels = {
        "recipe": "{recipe}", "tokens read after layer": "{layer}", "dimensions": "{dimensions}",
        "precision": "{precision}",
    }  # fmt: skip
    return table(made, labels, ("model", "set"), ("machine", "date"))


@block("precision")
def _(results: Results, page: Path) -> str:
    split = ("model", "set", "metric")
    rows = results.of("scores", TRAINED, AT_ITS_END, c.set.is_in([*PAIRS, *WORD_SETS, *TITLES]))
    rows = rows.filter(c.precision.n_unique().over(split) == 2)
    rows = rows.filter((c.precision == "float32").any().over(*split, "recipe", "pooling"))
    named = {name: c.precision == name for name in ("float32", "bfloat16")}
    return table(columns(rows, named), RECIPES, split, ("date",))


@block("measured")
def _(results: Results, page: Path) -> str:
    made = cells(results.of("scores"), "last measured", lambda row: row["date"])
    return table([made], fields("model", "precision", "versions"), caption=())


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


def with_titles(rows: pl.DataFrame, bold: str, show: Show | None = None) -> list[pl.DataFrame]:
    """Columns of the pairs and of the titles."""
    pairs = rows.filter(SPEARMAN)
    return [*columns(pairs, is_set(PAIRS), show, bold), *columns(rows, is_set(TITLES), show, bold)]


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
        [*shown[:2], *columns(words, is_set(WORD_SETS), grid.alone, bold="score"), *shown[2:]],
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
    made = columns(one_precision(rows), named, bold="score")
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


def trained_on_states(
    results: Results, page: Path, where: pl.Expr, labels: Mapping[str, str], metrics: Sequence[str] = ("Spearman",)
) -> str:
    """FREEZE's methods: means over the seeds, by the trained similarity and by what a vector store sees."""
    rows = results.of("freeze", where, c.seed.is_null(), c.set.is_in(PAIRS))
    own, cosine = c.reading == "its own similarity", (c.reading == "cosine") & SPEARMAN
    named = {f"{metric} of its own similarity": own & (c.metric == metric) for metric in metrics}
    made = columns(rows, {**named, "Spearman of the cosine": cosine}, bold="score")
    made.append(cells(rows.filter(cosine), "ahead of Early and late", grid.ahead))
    return table(made, labels, ("model", "set"), ("precision", "pairs", "date"))


OF_THE_PAPER, ALL_PAIRS = c.method.is_in(PAPERS_ROWS), c.pairs > 1000
DRAWN = c.method.is_in([LOG_VARIANCE, LOG_VARIANCE_PROMPTED, WHITENED, WHITENED_FASTER])
BLOCKS |= {
    "freeze-paper": partial(
        trained_on_states, where=OF_THE_PAPER & ALL_PAIRS, labels=fields("method"), metrics=["Pearson", "Spearman"]
    ),
    "freeze-ahead": partial(
        trained_on_states, where=~OF_THE_PAPER & ALL_PAIRS,
        labels=fields("method", "layers", "width", "dimensions", "rate"),
    ),
    "freeze-few": partial(
        trained_on_states, where=DRAWN, labels={"method": "{method}", "labelled pairs": "{pairs}"}
    ),
}  # fmt: skip


@block("freeze-choice")
def _(results: Results, page: Path) -> str:
    rows = results.of(
        "freeze", c.seed == 0, c.set.is_in(["STS-B en dev", "STS-B zh dev"]), c.pairs == 1000, SPEARMAN,
        c.method.str.starts_with("whitened"),
    )  # fmt: skip
    named = {f"Spearman of {what}": c.reading == reading
             for what, reading in (("the cosine", "cosine"), ("its own similarity", "its own similarity"))}  # fmt: skip
    labels = fields("layers", "width", "dimensions", "rate")
    return table(columns(rows, named, grid.alone, bold="score"), labels, ("model", "set"), ("pairs", "date"))


@block("held-out")
def _(results: Results, page: Path) -> str:
    made = columns(results.of("held_out", c.against == "", FIRST), is_set(HELD_OUT), bold="score")
    return table(made, {"read by": "{recipe}"}, ("model",))


@block("held-out-ahead")
def _(results: Results, page: Path) -> str:
    rows = results.of("held_out", c.recipe.is_in(["echo-topic", "topic"]), c.against.is_in(OTHERS), FIRST)
    return table(
        columns(rows, is_set(HELD_OUT), grid.ahead), {"read by": "{recipe}", "ahead of": "{against}"}, ("model",)
    )


@block("held-out-labelled")
def _(results: Results, page: Path) -> str:
    rows = results.of("held_out", c.against == "", c.metric.is_in(TOLD_APART))
    named = {**is_set({name: f"{name} test" for name in LABELLED}), "mean, English": OF_ALL_LABELLED}
    return table(columns(rows, named, bold="score"), {"read by": "{recipe}"}, ("model", "metric"))


@block("held-out-labelled-ahead")
def _(results: Results, page: Path) -> str:
    rows = results.of("held_out", c.recipe.is_in(["echo-topic", "topic"]), OF_ALL_LABELLED)
    rows = rows.filter(~c.against.is_in(["", "echo-topic"]))
    named = {metric: c.metric == metric for metric in TOLD_APART}
    return table(columns(rows, named, grid.ahead), {"read by": "{recipe}", "ahead of": "{against}"}, ("model",))


@block("topic-and-means")
def _(results: Results, page: Path) -> str:
    rows = results.of("held_out", c.recipe == "echo-topic", c.against == "echo-means")
    rows = rows.filter(c.metric.is_in(["Spearman", *TOLD_APART]))
    named = {name: f"{name} test" for name in ("STS-B en", *LABELLED, "STS-B zh")}
    return table(columns(rows, is_set(named), grid.ahead), fields("model", "metric"))


@block("fitted")
def _(results: Results, page: Path) -> str:
    rows = results.of("fitted")
    mean = c.set == "mean"
    rows = rows.sort(mean, maintain_order=True).drop("at").with_row_index("at")
    rows = rows.with_columns(label=pl.when(mean).then(pl.format("mean of {} sets", c.sets)).otherwise(c.set))
    others = {title: c.fitted_on == title for title in FITTED_ON}
    made = [cells(rows.filter(c.ahead.is_null()), "{fitted_on}"), *columns(rows, others, grid.ahead)]
    return table(made, {"set": "{label}"}, ("model", "recipe"))


@block("several-endings")
def _(results: Results, page: Path) -> str:
    rows = results.of("several", c.set == "mean")
    beside = {f"ahead of {name} alone": c.against == name for name in ("topic", "domain")}
    made = [cells(rows.filter(c.against == ""), "mean"), *columns(rows, beside, grid.ahead)]
    labels = {"copies": "{copies}", "asked for": "{recipe}"}
    return table(made, labels, caption=("model", "precision", "texts", "date"))


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
    compared = {language: endings(language)[0].words for language in CHOSEN}
    rows = results.of("wordings", c.readout == "sum")
    return spread(rows, ("model", "language", "copies", "stage"), "ending", CHOSEN, compared, "PromptEOL's")


@block("beginnings")
def _(results: Results, page: Path) -> str:
    without = {"en": WHOLE_EN[0], "zh": WHOLE_ZH[0]}
    compared = {language: f"{words}{{text}}{BETWEEN[language]}{{text}}" for language, words in without.items()}
    return spread(results.of("beginnings"), ("model", "language"), "layout", USUAL, compared, "no words before")


@block("distil")
def _(results: Results, page: Path) -> str:
    rows = results.of("distil", c.set == ENGLISH)
    made = [
        cells(rows, "Spearman x 100", bold="score"),
        cells(rows, "share of the teacher's, %", lambda row: grid.fraction(row, "share", "share_low", "share_high")),
        cells(rows, "held-out texts: order of cosines", lambda row: grid.percent(row["agreement"])),
        cells(rows, "held-out texts: nearest ten", lambda row: grid.percent(row["neighbours"])),
        cells(rows, "processor seconds", grid.number("seconds")),
    ]
    return table(made, fields("student", "dimensions"), ("model", "set", "corpus"), ("precision", "texts", "date"))


@block("bellm")
def _(results: Results, page: Path) -> str:
    rows = results.of("bellm", c.seed.is_null())
    made = [
        cells(rows, "Spearman x 100", bold="score"),
        cells(rows, "ahead of no layer turned", grid.ahead),
        cells(rows, "trainings", grid.number("seeds")),
        cells(rows, "compared", grid.number("ahead_seeds")),
    ]
    labels = {"method": "{method}", "turned": "{turned}", "read": "{reading}", "precision": "{precision}"}
    return table(made, labels, ("model", "set", "triplets"), ("date",))


@block("jtcse")
def _(results: Results, page: Path) -> str:
    rows = results.of("jtcse", c.seed.is_null(), c.set == ENGLISH)
    made = [cells(rows, "Spearman x 100"), cells(rows, "ahead of SimCSE", grid.ahead)]
    said = ("model", "set", "precision", "texts", "date")
    return table(made, {"trained further by": "{method}", "steps": "{steps}"}, caption=said)


@block("install-size")
def _(results: Results, page: Path) -> str:
    rows = results.of("install")
    made = [cells(rows, "packages", grid.number("packages")), cells(rows, "MB", grid.number("megabytes", ",.1f"))]
    return table(made, {"": "{part}"}, ("system", "python"), ("date", "versions"))


@block("batches")
def _(results: Results, page: Path) -> str:
    made = cells(results.of("batches"), "{precision}", grid.number("distance", ".1e"))
    return table([made], fields("module"), ("model",), ("date", "machine", "versions"))


@block("serving")
def _(results: Results, page: Path) -> str:
    made = cells(results.of("serving"), "{quantity}", grid.number("value", ",.4g"))
    return table([made], fields("clients"), ("model",), ("date", "machine", "versions"))


RATIO = {"ratio": "{quantity}: {contender} / {unit}"}
OF_RECIPE = {"recipe": "{contender}"}
WITH_PRECISION = {**OF_RECIPE, "backbone": "{precision}"}
LENGTHS, LENGTHS_BY_BATCH = "n = {tokens}", "n = {tokens}, batch {batch}"
TIME, FLOAT32, BFLOAT16 = c.quantity == "time", c.precision == "float32", c.precision == "bfloat16"
SPEEDS = c.quantity.is_in(["tokens of text/s", "MiB of encoding"])
BY_QUANTITY = ("quantity", "model", "machine")


def costs(
    results: Results,
    page: Path,
    name: str,
    labels: Mapping[str, str],
    titles: str | Mapping[str, tuple[str, Show]],
    where: pl.Expr = TIME,
    split: Sequence[str] = ("model", "machine"),
) -> str:
    """One table of cost.csv; what neither rows nor columns say stands above.

    Args:
        results: All.
        page: Where it stands.
        name: In the field ``table``.
        labels: Of the rows.
        titles: Of the columns, with the numbers of a row in ascending order; or by title the quantity and how it shows.
        where: Which rows.
        split: As for :func:`table`.
    """
    rows = results.of("cost", c.table == name)
    if isinstance(titles, str):
        rows = rows.filter(where)
        numbers = [each for each in re.findall(r"\{(\w+)\}", titles) if rows[each].dtype.is_integer()]
        made = [cells(rows.sort(numbers, maintain_order=True) if numbers else rows, titles, grid.cost)]
    else:
        made = [cells(rows.filter(c.quantity == quantity), title, show) for title, (quantity, show) in titles.items()]
    used = " ".join([*labels.values(), titles if isinstance(titles, str) else ""])
    said = [each for each in ("precision", "tokens", "batch", "how", "date", "versions") if f"{{{each}}}" not in used]
    return table(made, labels, split, said)


def of_cost(name: str, labels: Mapping[str, str], titles: str | Mapping[str, tuple[str, Show]], **more: Any) -> Block:
    return partial(costs, name=name, labels=labels, titles=titles, **more)


BLOCKS |= {
    "cost-recipes": of_cost("recipes", RATIO, "batch {batch}"),
    "cost-plain": of_cost("plain", RATIO, "{precision}"),
    "cost-alone": of_cost("alone", {"ratio": "time: {contender} / {unit}, {precision}"}, LENGTHS_BY_BATCH),
    "cost-beside-echo": of_cost("beside-echo", RATIO, LENGTHS_BY_BATCH),
    "cost-step": of_cost("step", RATIO, "batches of {batch}"),
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
        "tokens of text/s": ("tokens of text/s", grid.cost),
        "time / float32's": ("time", grid.cost),
        "Spearman x 100": ("Spearman x 100", grid.points),
        "less that of float32": ("change of Spearman x 100", grid.points),
    }),
    "speed-compiled": of_cost("compiled", WITH_PRECISION, {
        "tokens of text/s": ("tokens of text/s", grid.cost),
        "time / not compiled": ("time", grid.cost),
        "processor seconds for the first texts": ("seconds for the first texts", grid.cost),
    }),
    "speed-encode": of_cost("encode", OF_RECIPE, {
        "texts/s": ("texts/s", grid.cost),
        "tokens of text/s": ("tokens of text/s", grid.cost),
        "FLOP/s, as a share of a 1024 x 1024 matrix product's": ("FLOP/s", grid.cost),
    }),
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
    """What speed was asked for: a figure in words, with fields of its row of cost.csv; which rows; and its bounds."""

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
    lines = [["figure", "asked", "seen", "as asked", "measured on"]]
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
