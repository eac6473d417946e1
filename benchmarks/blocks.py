"""Tables of README.md, RESULTS.md and docs/, each by a function from the results to Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import polars as pl
from polars import col as c
from typer.main import get_command

import records
import tabular
from st_reba.compare.results import Comparison
from st_reba.recipes import every_row
from st_reba_cli import app
from tabular import REFERENCES, Show, cells, markdown, table

SMOLLM2 = "SmolLM2-135M-Instruct"
GEMMA = "Gemma 3 270M"
HALF, QWEN = "Qwen2.5-Coder-0.5B-Instruct", "Qwen2.5-Coder-1.5B-Instruct"
ENGLISH, CHINESE = "STS-B en test", "STS-B zh test"
PAIRS = (ENGLISH, CHINESE)
WORDS = ("accuracy, Euclidean", "accuracy, cosine")
TITLES = ("TNews", "THUCNews")
BAG = "Bag of input embeddings"
PROMPTEOL = ["PromptEOL", "PromptEOL, Chinese"]
PARTWISE, SUM = "partwise whitened", "standardised sum"
#: Descriptions in the first table of methods, by a recipe's key; each may name the row before.
IN_BRIEF = {
    "classical": "Pool the last hidden states",
    "prompteol": "Ask for one word, and keep the last token",
    "pretended-cot": "PromptEOL that says to think step by step",
    "knowledge": "PromptEOL that says what matters in a text",
    "ck": "Mean of Pretended CoT and Knowledge",
    "metaeol": "Mean of eight prompts for eight tasks",
    "reverse-eol": "Mean of PromptEOL forward and reversed",
    "topic": "Ask for the topic; add lower layers",
    "echo-topic": "Topic of a repeated text, with its mean",
    "early-late": "PromptEOL and the text's early states",
    "value-aggregation": "Mean of PromptEOL's attention outputs over layers",
    "contrastive-prompting": "PromptEOL less what another prompt finds irrelevant",
    "token-prepending": "Give a slot before the text the last token's state",
    "promptreps": "PromptEOL, and weights of words from the head",
    "echo-2": "Repeat the text, and keep the second copy",
    "reba-2": "Let the first copy look back, by attention",
    "rt-2": "Read again with what the last token attended to",
    "bidirectional": "Let the last layer attend both ways",
    "no-sink": "Let half of the layers attend both ways",
    "kv-rerouting": "Let all tokens see the last one",
    "attention-pooling": "Pool by the last token's attention",
}
#: Models of grid.csv by size, and the texts that its recipes are fitted on by default.
SIZES = {"SmolLM2 135M": SMOLLM2, "Gemma 3 270M": GEMMA, "Qwen2.5-Coder 0.5B": HALF, "Qwen2.5-Coder 1.5B": QWEN}
USUAL_FIT = "200 texts of the set"
#: Other texts to show, of those in the file.
OTHER_FITS = ("50 texts of the set", "1,000 texts of the set", "200 sentences of the package", "200 captions")
#: Titles of the columns of retrieval.csv, and how the sets begin.
COLLECTIONS = {
    "CMRC 2018, Gemma": "CMRC 2018 test",
    "CMRC 2018 sentences, Gemma": "CMRC 2018, sentences test",
    "Cranfield, SmolLM2": "Cranfield test",
    "HotpotQA, SmolLM2": "HotpotQA test",
}

SPEARMAN = c.metric == "Spearman"
BY_SIZE = {title: c.model == name for title, name in SIZES.items()}
GRID_MEANS = c.set.str.starts_with("mean") & ~c.set.str.contains("classes")
TRAINED = c.weights == "trained"
EARLY_LATE = (c.recipe == "Early and late") & (c.filter == PARTWISE)
#: Recipes as their authors read them, with their own filters.
OWN_END = (c.filter == "") | EARLY_LATE | (c.filter == SUM)


class Results:
    """The files of results, each read once."""

    def __init__(self, directory: Path = records.RESULTS) -> None:
        self.directory = directory
        self._read = cache(partial(records.read, directory=directory))

    def of(self, name: str, *where: pl.Expr) -> pl.DataFrame:
        """Return the rows of a file that fit, with their place in the file as ``at``."""
        return self._read(name).with_row_index("at").filter(*where)


Block = Callable[[Results, Path], str]


def one_precision(rows: pl.DataFrame) -> pl.DataFrame:
    """Keep the rows of each model in the precision that most of them have, float32 if two have as many."""
    count = rows.group_by("model", "precision").len()
    chosen = count.sort("len", "precision").unique("model", keep="last")
    return rows.join(chosen, on=["model", "precision"], how="semi", maintain_order="left")


def labelled(rows: pl.DataFrame, named: Mapping[str, pl.Expr]) -> pl.DataFrame:
    """Select rows by condition, in this order, with the key of the condition as the field ``label``."""
    parts = [
        rows.filter(where).with_columns(label=pl.lit(title), at=pl.lit(place, pl.UInt32))
        for place, (title, where) in enumerate(named.items())
    ]
    return pl.concat(parts)


class Shown(NamedTuple):
    """Text of a column's cells, the rows that it shows, and the field whose highest value is bold."""

    show: Show = tabular.score
    where: pl.Expr = pl.lit(True)
    bold: str = ""


def columns(rows: pl.DataFrame, titles: Mapping[str, Shown]) -> list[pl.DataFrame]:
    """Return columns by title; a title with ``{name}`` makes several."""
    return [cells(rows.filter(own.where), title, own.show, own.bold) for title, own in titles.items()]


def alike(named: Mapping[str, pl.Expr], show: Show = tabular.score, bold: str = "") -> dict[str, Shown]:
    """Return columns that show the same of other rows."""
    return {title: Shown(show, where, bold) for title, where in named.items()}


def of_file(
    name: str,
    titles: Mapping[str, Shown],
    labels: Mapping[str, str],
    *where: pl.Expr,
    split: Sequence[str] = ("model", "set"),
    caption: Sequence[str] = ("precision", "date"),
) -> Block:
    """Return the table of some rows of a file: see :func:`tabular.table`."""

    def made(results: Results, page: Path) -> str:
        return table(columns(results.of(name, *where), titles), labels, split, caption)

    return made


def fields(*names: str) -> dict[str, str]:
    """Return labels that are the values of fields, with the names of the fields as heads."""
    return {name: f"{{{name}}}" for name in names}


RECIPES = fields("recipe", "pooling")


# Tables of the package itself


def methods(results: Results, page: Path) -> str:
    """Return a line for each method."""
    named = {row.key: row for row in every_row()}
    where = "docs/methods/" if page.name == "README.md" else "methods/"
    lines = [["method", "what it does", "passes over the text"]]
    for key, says in IN_BRIEF.items():
        row = named[key]
        passes = row.cost.replace("prompts", "").replace("about ", "").strip()
        passes = passes.replace("little more than", ">").replace("less than", "<")
        lines.append([f"[{row.name}]({where}{row.page}.md)", says, passes])
    return markdown(lines)


def json_fields(results: Results, page: Path) -> str:
    """Return the fields of ``compare --json``, those of :class:`Comparison`."""
    lines = [["field", "what it is"]]
    attributes = inspect.getdoc(Comparison).partition("Attributes:\n")[2]  # type: ignore[union-attr]
    for name, told in re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", attributes, re.DOTALL | re.MULTILINE):
        lines.append([f"`{name}`", " ".join(told.split())])
    return f"**`st-reba/compare/1`**\n\n{markdown(lines)}"


def command_reference(results: Results, page: Path) -> str:
    """Return the help of each command."""
    group = get_command(app)
    parts = []
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        context = command.make_context(f"st-reba {name}", [], resilient_parsing=True)
        about = " ".join(command.help.split())
        lines = [f"### st-reba {name}", "", about, "", "```text", command.get_usage(context), "```", ""]
        for parameter in command.params:
            names, description = parameter.get_help_record(context)
            lines.append(f"- `{names}`: {' '.join(description.split())}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


# Scores


def scores(results: Results, page: Path) -> str:
    """Return the score of each method at its own end, under its usual pooling, and its time."""
    named = {row.key: row for row in every_row()}
    usual = {named[key].name: named[key].poolings[0] for key in IN_BRIEF}
    rows = one_precision(results.of("scores", TRAINED, SPEARMAN, OWN_END))
    some = labelled(rows, {
        **{name: (c.recipe == name) & (c.pooling == pooling) for name, pooling in usual.items()},
        **{name: (c.recipe == name) & (c.filter == "") for name in (BAG, "tf-idf")},
        **{f"{name}, trained": (c.model == name) & (c.filter == "") for name in REFERENCES},
    })  # fmt: skip
    costs = results.of("cost", c.table == "recipes", c.model == SMOLLM2)
    times = labelled(costs, {name: c.contender == f"{name}, {pooling}" for name, pooling in usual.items()})
    trained = c.model.is_in(REFERENCES)
    made = {
        f"{ENGLISH}, SmolLM2": (c.set == ENGLISH) & ((c.model == SMOLLM2) | trained),
        f"{ENGLISH}, Gemma": (c.set == ENGLISH) & (c.model == GEMMA),
        f"{CHINESE}, Gemma": (c.set == CHINESE) & ((c.model == GEMMA) | trained),
    }
    return table(
        [*columns(some, alike(made)), cells(times, "time, Classical = 1, SmolLM2", tabular.cost)], {"recipe": "{label}"}
    )


def word_sense(results: Results, page: Path) -> str:
    rows = one_precision(results.of("scores", c.metric.is_in(WORDS), c.filter == ""))
    made = []
    for metric in WORDS:
        own = rows.filter(c.metric == metric)
        made.append(cells(own.filter(TRAINED), metric.removeprefix("accuracy, "), bold="score"))
        made.append(cells(own.filter(~TRAINED), "random weights", lambda row: tabular.percent(row["score"])))
    return table(made, RECIPES, ("model", "set"))


def claims(results: Results, page: Path) -> str:
    rows = one_precision(results.of("claims", c.set.str.starts_with("STS-B")))
    return table([cells(rows, "{set}, {model}", tabular.difference)], {"claim": "{claim}"})


def scores_of_the_page(results: Results, page: Path) -> str:
    names = [row.name for row in every_row() if row.page == page.stem]
    rows = one_precision(results.of("scores", TRAINED, OWN_END, c.recipe.is_in(["Classical", *names])))
    if rows.filter(c.recipe.is_in(names)).is_empty():
        return ""
    pairs = columns(rows.filter(SPEARMAN), alike({name: c.set == name for name in PAIRS}, bold="score"))
    titles = columns(rows, alike({name: c.set == name for name in TITLES}, bold="score"))
    return table([*pairs, *titles], RECIPES, ("model",))


def filters(results: Results, page: Path) -> str:
    rows = results.of("scores", TRAINED, SPEARMAN, c.set.is_in(PAIRS))
    named = {
        "Classical, mean": (c.recipe == "Classical") & (c.pooling == "mean"),
        "Classical, last": (c.recipe == "Classical") & (c.pooling == "last"),
        "Echo-2, mean": (c.recipe == "Echo-2") & (c.pooling == "mean"),
        "PromptEOL": c.recipe.is_in(PROMPTEOL),
        "bag of input embeddings": c.recipe == BAG,
    }
    made = columns(one_precision(rows), alike(named, bold="score"))
    return table(made, {"behind the pooling": "{filter}"}, ("model", "set"))


def compared_sure(results: Results, page: Path) -> str:
    """Return the number of sets on which each version is surely ahead, and its time."""
    rows = results.of("compared")
    counted = rows.group_by("version", maintain_order=True).agg(
        pl.len().alias("sets"),
        (c.advised != "").sum().alias("a recipe is advised"),
        (c.control_low > 0).sum().alias("surely ahead of every control"),
        (c.plain_low > 0).sum().alias("surely ahead of the plain embedding"),
        (100 * c.score.mean()).round(1).alias("mean score"),
        c.seconds.median().round().cast(pl.Int64).alias("seconds of the processor, median"),
    )
    return markdown([counted.columns, *(list(map(str, row)) for row in counted.rows())])


def compare_errors(results: Results, page: Path) -> str:
    """Return measured and promised error rates of simulated data, by quantity and metric."""
    lines = [["in % or points", "score", "settings", "answers", "promised", "worst", "mean"]]
    rows = results.of("compare_errors", ~c.quantity.str.starts_with("named where"))
    for [quantity, metric], own in rows.group_by("quantity", "metric", maintain_order=True):
        least, most = own["at_least"][0], own["at_most"][0]
        ends = [f"{word} {100 * end:g}" for word, end in (("at least", least), ("at most", most)) if end is not None]
        # The worst value is the nearest to a promised bound, or beyond it.
        room = pl.min_horizontal(c.value - c.at_least, c.at_most - c.value).fill_null(-c.value)
        worst = own.sort(room)["value"][0]
        figures = [tabular.percent(value) for value in (worst, fmean(own["value"]))]
        lines.append([quantity, metric, str(len(own)), f"{own['runs'].sum():,}", ", ".join(ends), *figures])
    return markdown(lines) if len(lines) > 1 else ""


def architectures(results: Results, page: Path) -> str:
    """Return the numbers of architectures that run each recipe and that refuse it."""
    rows = results.of("architectures")
    if rows.is_empty():
        return ""
    names, shared = rows["architecture"].n_unique(), rows.filter(c.recipe == "all")
    refused, unbuilt = (shared.filter(c.verdict == verdict).height for verdict in ("refused", "not built"))
    release = max(rows["transformers"].to_list())
    text = (
        f"transformers {release} has {names} causal architectures. {names - refused - unbuilt} run recipes, {refused} "
        f"are refused as a whole, and {unbuilt} could not be built from the defaults of their configurations."
    )
    counted = (
        rows.filter(c.recipe != "all")
        .group_by("recipe")
        .agg(*((c.verdict == verdict).sum().alias(verdict) for verdict in ("right", "refused")))
    )
    lines = [list(map(str, row)) for row in counted.sort("right", "recipe", descending=[True, False]).rows()]
    return f"{text}\n\n{markdown([counted.columns, *lines])}"


OWN, COSINE = c.reading == "its own similarity", (c.reading == "cosine") & SPEARMAN

BLOCKS: dict[str, Block] = {
    "methods": methods, "json": json_fields, "command-reference": command_reference, "scores": scores,
    "word-sense": word_sense, "claims": claims, "scores-of-the-page": scores_of_the_page, "filters": filters,
    "compared-sure": compared_sure, "compare-errors": compare_errors, "architectures": architectures,
    "compare-power": of_file(
        "compare_errors", {"{quantity}": Shown(lambda row: f"{100 * row['value']:.0f}%")}, {"pairs": "{items}"},
        c.quantity.str.starts_with("named where"), split=(), caption=(),
    ),
    "measured": of_file(
        "scores", {"last measured": Shown(lambda row: row["date"])}, fields("model", "precision", "versions"),
        split=(), caption=(),
    ),
    "grid": of_file(
        "grid", alike(BY_SIZE, bold="score"), fields("recipe", "filter"), c.against == "", GRID_MEANS, split=["set"],
    ),
    "grid-ahead": of_file(
        "grid", alike(BY_SIZE, tabular.ahead), {"recipe": "{recipe}", "ahead of": "{against}"},
        c.against.is_in(["Echo topic", "as it is"]), GRID_MEANS, split=["set"],
    ),
    "grid-fits": of_file(
        "grid", alike({text: c.fitted_on == text for text in OTHER_FITS}, tabular.ahead),
        fields("model", "set", "recipe"), c.against == USUAL_FIT, split=(),
    ),
    "retrieval": of_file(
        "retrieval", alike({title: c.set.str.starts_with(name) for title, name in COLLECTIONS.items()}, bold="score"),
        fields("recipe", "filter"), c.metric == "nDCG@10", split=(), caption=("precision", "max_tokens", "date"),
    ),
    "rerank": of_file(
        "rerank", {
            "BM25": Shown(where=c.reading == "BM25"),
            "reranked": Shown(where=c.reading == "together"),
            **alike({
                "ahead of BM25": c.reading == "together",
                "ahead, the list reversed": c.reading == "together, reversed",
            }, tabular.ahead),
        },
        fields("model", "set"), split=(), caption=("precision", "max_tokens", "date"),
    ),
    "freeze-paper": of_file(
        "freeze", alike({
            **{f"{metric} of its own similarity": OWN & (c.metric == metric) for metric in ("Pearson", "Spearman")},
            "Spearman of the cosine": COSINE,
        }, bold="score") | {"ahead of Early and late": Shown(tabular.ahead, COSINE)},
        fields("method"), ~c.method.str.starts_with("whitened"), c.pairs > 1000, c.seed.is_null(), c.set.is_in(PAIRS),
        caption=("precision", "pairs", "date"),
    ),
    "bellm": of_file(
        "bellm", {
            "Spearman x 100": Shown(bold="score"),
            "ahead of no layer turned": Shown(tabular.ahead),
            "trainings": Shown(tabular.number("seeds")),
            "compared": Shown(tabular.number("ahead_seeds")),
        },
        {**fields("method", "turned"), "read": "{reading}"}, c.seed.is_null(),
        split=("model", "set", "triplets"), caption=["date"],
    ),
    "jtcse": of_file(
        "jtcse", {"Spearman x 100": Shown(), "ahead of SimCSE": Shown(tabular.ahead)},
        {"trained further by": "{method}", "steps": "{steps}"}, c.seed.is_null(), c.set == ENGLISH, split=(),
        caption=("model", "set", "precision", "texts", "date"),
    ),
    "loaded": of_file(
        "loaded", {"{model}": Shown(tabular.number("value", ",.3g"))}, {"measured": "{quantity}"}, split=["precision"],
        caption=("date", "versions"),
    ),
    "one-process": of_file(
        "one_process", {"{contender}": Shown(tabular.number("value", ",.4g"))}, {"measured": "{quantity}"},
        split=["model", "precision"], caption=("date", "versions"),
    ),
    "llama-cpp": of_file(
        "llama_cpp", {"{contender}": Shown(tabular.number("value", ",.4g"))}, fields("quantity", "set", "threads"),
        ~c.quantity.str.contains("cosine"), split=["model"], caption=("date", "machine", "versions"),
    ),
    "removed": of_file(
        "removed", {"figure": Shown(tabular.removed), "last version": Shown(lambda row: row["version"])},
        {"removed": "{name}", "what it did": "{did}", "measured": "{measured}"}, split=(), caption=(),
    ),
}  # fmt: skip


# Time and memory


def of_cost(name: str, labels: Mapping[str, str], title: str, *where: pl.Expr, caption: Sequence[str] = ()) -> Block:
    """Return one table of cost.csv, split by model and machine."""
    more = (*caption, "how", "date", "versions")
    return of_file(
        "cost", {title: Shown(tabular.cost)}, labels, c.table == name, *where, split=("model", "machine"), caption=more
    )


RATIO, LENGTHS = {"ratio": "{quantity}: {contender} / {unit}"}, "n = {tokens}"
BOTH = ("precision", "batch")
BLOCKS |= {
    "cost-plain": of_cost("plain", RATIO, "{precision}", c.quantity == "time", caption=["batch"]),
    "cost-alone": of_cost("alone", {"ratio": "time: {contender} / {unit}, {precision}"}, "n = {tokens}, batch {batch}"),
    "cost-repetition": of_cost("repetition", RATIO, LENGTHS, c.precision == "float32", caption=BOTH),
    # On a GPU the memory is that of encoding, as all contenders hold the same weights.
    "cost-gpu": of_cost("repetition", RATIO, LENGTHS, c.precision == "bfloat16", caption=BOTH),
}  # fmt: skip
