"""What stands in each table of README.md, RESULTS.md and docs/."""

from __future__ import annotations

from dataclasses import replace

from listing import OF_THE_PAGE, WORTH_TRYING, Listing, Measured
from picture import ByCost, ByLabels, ByLayer, Named, Panel, Picture, Series
from pivot import ANY, REFERENCES, Best, Column, Conditions, Each, Row, Table
from real.endings import BETWEEN, CHOSEN, USUAL, WHOLE_EN, WHOLE_ZH, endings
from records import Value
from spread import Spread
from targets import SPEED as SPEED_TARGETS
from targets import Targets

SMOLLM2 = "SmolLM2-135M-Instruct"
GEMMA = "Gemma 3 270M"
ENGLISH, CHINESE = "STS-B en test", "STS-B zh test"
PAIRS = (ENGLISH, CHINESE)
WORD_SETS = ("SLPWC", "WSD")
WORDS = ("accuracy, Euclidean", "accuracy, cosine")
TITLES = ("TNews", "THUCNews")
BAG = "Bag of input embeddings"
CONTROLS = (BAG, "tf-idf", "Bag of random embeddings")
PROMPTEOL = ("PromptEOL", "PromptEOL, Chinese")
#: What stands behind the pooling.
PARTWISE = "partwise whitened"
FILTERS = ("centred", "standardised", "filtered", "whitened", "all but the top", PARTWISE)

TRAINED = {"weights": "trained"}
RANDOM = {"weights": "random"}
AT_ITS_END = {"layer": None, "filter": ""}
SPEARMAN = {"metric": "Spearman"}
RECIPES = Each(("recipe", "pooling"))
#: How FREEZE's scores are read: by the trained similarity, and by what a vector store sees.
OWN, COSINE = {"reading": "its own similarity"}, {"reading": "cosine"}
PEARSON = {"metric": "Pearson"}
#: The methods of the paper's table.
PAPERS_ROWS = (
    "MLP on cosines", "siamese", "autoencoder", "autoencoder, log-variance",
    "autoencoder, log-variance, the paper's head",
)  # fmt: skip
#: The sets of held_out.csv, and what its recipes are compared with.
HELD_OUT = tuple(
    Column(title, {"set": name})
    for title, name in (
        ("STS-B en, Spearman", ENGLISH),
        ("Banking77, accuracy", "Banking77 test"),
        ("StackOverflow, accuracy", "StackOverflow test"),
        ("mean, English", f"mean of {ENGLISH}, Banking77 test, StackOverflow test"),
        ("STS-B zh, Spearman", CHINESE),
        ("TNews, accuracy", "TNews test"),
        ("mean, Chinese", f"mean of {CHINESE}, TNews test"),
    )
)
#: How well labelled texts are told apart, and the sets; their mean is over all of them.
NEAREST = "accuracy of 5 neighbours"
TOLD_APART = (NEAREST, "accuracy of logistic regression", "V-measure of k-means")
LABELLED = ("Banking77", "CLINC150", "HWU64", "StackOverflow", "TREC", "TNews")
#: What the first tables show of held_out.csv.
FIRST = {"metric": ("Spearman", NEAREST, "mean")}
OTHERS = ("all-MiniLM-L6-v2", "all-mpnet-base-v2", "m3e-small", "tf-idf", "early-late", "prompteol", "topic")
#: The layers and the width that were best on the development pairs of both models, with the rate of each.
WHITENED, WHITENED_FASTER = "whitened, prompt, last, 256, 0.0001", "whitened, prompt, last, 256, 0.001"
#: The paper's method, read where it reads and at the end of a prompt.
LOG_VARIANCE, LOG_VARIANCE_PROMPTED = "autoencoder, log-variance", "autoencoder, log-variance, prompt"


def is_layer(value: Value) -> bool:
    return value is not None


def each_fifth(value: Value) -> bool:
    """A layer in five."""
    return isinstance(value, int) and value % 5 == 0


def of_test_queries(value: Value) -> bool:
    return str(value).endswith(" test")


def all_pairs(value: Value) -> bool:
    """All labelled pairs that there are, not a few of them."""
    return isinstance(value, int) and value > 1000


def of_all_labelled(value: Value) -> bool:
    return str(value).endswith(" labelled sets")


def is_control(value: Value) -> bool:
    return value in CONTROLS


def is_recipe(value: Value) -> bool:
    return not is_control(value)


def dev(pairs: str) -> str:
    """The development part beside a test part."""
    return pairs.replace("test", "dev")


EARLY_LATE = {"recipe": "Early and late", "pooling": "mean", "layer": None, "filter": PARTWISE}
ANY_RECIPE = {"recipe": Best(is_recipe), "pooling": ANY, "layer": ANY, "filter": ANY}
ANY_CONTROL = {**ANY_RECIPE, "recipe": Best(is_control)}


def all_recipes(where: Conditions, *split: str) -> Table:
    """Every recipe at its own end, behind nothing and behind each filter."""
    return Table(
        "scores",
        where={**where, "layer": None},
        split=("model", *split),
        rows=Each(("recipe", "pooling"), where=TRAINED),
        columns=(
            Column("as it is", {**TRAINED, "filter": ""}),
            Column("random weights", {**RANDOM, "filter": ""}, interval=False, bold=False),
            Column("beyond overlap", {**TRAINED, "filter": ""}, show="beyond overlap"),
            *(Column(name, {**TRAINED, "filter": name}) for name in FILTERS),
        ),
        references=True,
    )


def best_layers(pairs: str) -> Table:
    """Every recipe where it is best on the development part, read on the test part."""
    return Table(
        "scores",
        where={**TRAINED, **SPEARMAN, "set": pairs},
        split=("model",),
        rows=Each(("recipe", "pooling"), where={"layer": is_layer}),
        columns=(
            Column("own end", AT_ITS_END),
            Column("best layer", {"layer": ANY, "filter": ""}, chosen=dev(pairs)),
            Column("best layer and filter", {"layer": ANY, "filter": ANY}, chosen=dev(pairs)),
        ),
    )


def costs(table: str, quantities: tuple[str, ...], rows: Each, columns: Each, *split: str, **where: Value) -> Table:
    """Some quantities of one table of cost.csv; what neither rows nor columns say stands above."""
    said = ("precision", "batch", "how", "date", "versions")
    return Table(
        "cost",
        where={"table": table, "quantity": quantities, **where},
        split=(*split, "model", "machine"),
        rows=rows,
        columns=columns,
        caption=tuple(name for name in said if name not in (*rows.fields, *columns.fields)),
    )


def trained_on_states(rows: Each, *columns: Column, **where: object) -> Table:
    """FREEZE's methods: means over the seeds."""
    return Table(
        "freeze",
        where={"seed": None, "set": PAIRS, **where},
        split=("model", "set"),
        rows=rows,
        columns=(
            *columns,
            Column("Spearman of the cosine", {**SPEARMAN, **COSINE}),
            Column("ahead of Early and late", {**SPEARMAN, **COSINE}, show="ahead", bold=False),
        ),
        caption=("precision", "pairs", "date"),
    )


RATIO = Each(("quantity", "contender", "unit"), (("ratio", "{quantity}: {contender} / {unit}"),))
RATIO_BY_BATCH = Each((*RATIO.fields, "batch"), (("ratio", "{quantity}: {contender} / {unit}, batch {batch}"),))
SPEED = Each(("contender",), (("recipe", "{contender}"),))
SPEEDS = ("tokens of text/s", "MiB of encoding")
LENGTHS = Each(("tokens",), (("", "n = {tokens}"),), sort=True)
LENGTHS_BY_BATCH = Each(("tokens", "batch"), (("", "n = {tokens}, batch {batch}"),), sort=True)
SHAPES = Each(("batch", "tokens"), (("", "{batch} x {tokens}"),), sort=True)

BLOCKS: dict[str, Table | Picture | Listing | Measured | Targets | Spread] = {
    "recipes": OF_THE_PAGE,
    "worth-trying": WORTH_TRYING,
    "first-screen": Table(
        "held_out",
        where={"against": "", "model": SMOLLM2, **FIRST},
        label="read by",
        rows=(
            Row("Echo topic, ours", {"recipe": "echo-topic"}),
            Row("Topic, ours, at half the cost", {"recipe": "topic"}),
            Row("Early and late, ours", {"recipe": "early-late"}),
            Row("PromptEOL", {"recipe": "prompteol"}),
            Row("tf-idf, without a model", {"recipe": "tf-idf"}),
            Row("all-MiniLM-L6-v2, trained", {"recipe": "all-MiniLM-L6-v2"}),
            Row("all-mpnet-base-v2, trained", {"recipe": "all-mpnet-base-v2"}),
        ),
        columns=(
            Column("STS-B, Spearman", {"set": ENGLISH}, bold=False),
            Column("StackOverflow, accuracy", {"set": "StackOverflow test"}, bold=False),
            Column("Banking77, accuracy", {"set": "Banking77 test"}, bold=False),
        ),
    ),
    "recipes-stsb-en": all_recipes({**SPEARMAN, "set": ENGLISH}),
    "recipes-stsb-zh": all_recipes({**SPEARMAN, "set": CHINESE}),
    "layers-stsb-en": best_layers(ENGLISH),
    "layers-stsb-zh": best_layers(CHINESE),
    "layers-picture": ByLayer(
        "layers.svg",
        panels=(Panel(SMOLLM2, ENGLISH), Panel(GEMMA, ENGLISH), Panel(GEMMA, CHINESE)),
        series=(
            Series("Classical, mean", {"recipe": "Classical", "pooling": "mean"}),
            Series("Classical, last", {"recipe": "Classical", "pooling": "last"}),
            Series("Echo-2, mean", {"recipe": "Echo-2", "pooling": "mean"}),
            Series("PromptEOL", {"recipe": "PromptEOL", "pooling": "last"}),
        ),
        level=Series(BAG, {"recipe": BAG, "layer": None}),
    ),
    "cost-picture": ByCost(
        "cost.svg",
        Panel(SMOLLM2, ENGLISH),
        recipes=(
            Named("Classical", "mean", up=-7),
            Named("Classical", "last"),
            Named("KV re-routing", "mean", right=-7),
            Named("Echo-2", "mean", right=2, up=17),
            Named("ReBA-2", "mean"),
            Named("PromptEOL", "last", right=-7, up=-6),
            Named("Value aggregation", "last", right=-7, up=3),
            Named("Pretended CoT", "last", up=-14),
            Named("CK", "mean"),
            Named("MetaEOL", "mean", right=-7),
            Named("Early and late", "mean", right=-7, filter=PARTWISE),
        ),
        levels=(
            Series("bag of input embeddings", {"model": SMOLLM2, "recipe": BAG, "filter": ""}),
            *(Series(f"{model}, trained", {"model": model, "filter": ""}) for model in REFERENCES),
        ),
        unit="Classical, mean",
    ),
    "cost-recipes": costs("recipes", ("time",), RATIO, Each(("batch",), (("", "batch {batch}"),))),
    "word-sense": Table(
        "scores",
        where={"metric": WORDS, "filter": ""},
        split=("model", "set"),
        rows=Each(("recipe", "pooling"), where=TRAINED),
        columns=tuple(
            column
            for metric in WORDS
            for column in (
                Column(metric.removeprefix("accuracy, "), {**TRAINED, "metric": metric, "layer": None}),
                Column("random weights", {**RANDOM, "metric": metric, "layer": None}, interval=False, bold=False),
                Column("its best layer", {**TRAINED, "metric": metric, "layer": Best(is_layer)}),
            )
        ),
    ),
    "titles": all_recipes({"set": TITLES}, "set", "metric"),
    "claims": Table(
        "claims",
        split=("model",),
        rows=Each(("claim", "first", "second"), (("claim", "{claim}"), ("difference", "{first} − {second}"))),
        columns=Each(("set",), (("", "{set}"),)),
    ),
    "ablations": Table(
        "ablations",
        where={"recipe": lambda name: name != "Echo topic"},
        split=("model", "set"),
        rows=Each(("recipe", "change")),
        columns=(
            Column("score", interval=False, bold=False),
            Column("ahead of PromptEOL", show="difference", bold=False),
        ),
    ),
    "dependency": Table(
        "dependency",
        where={"layer": None},
        split=("model", "set"),
        rows=Each(("recipe",)),
        columns=(
            Column("median, and quartiles", TRAINED, show="median", bold=False),
            Column("random weights", RANDOM, show="median", bold=False),
        ),
    ),
    "dependency-layers": Table(
        "dependency",
        where={**TRAINED, "recipe": "Classical", "layer": is_layer},
        split=("model", "set"),
        rows=Each(("layer",), (("after layer", "{layer}"),), where={"layer": each_fifth}),
        columns=(Column("median, and quartiles", show="median", bold=False),),
    ),
    "retrieval": Table(
        "retrieval",
        where={"set": of_test_queries},
        split=("set", "model"),
        rows=Each(("recipe", "pooling", "filter")),
        columns=(
            Column("nDCG@10", {"metric": "nDCG@10"}),
            Column("recall@100", {"metric": "recall@100"}),
            Column("processor seconds for 1,000", {"metric": "nDCG@10"}, show="seconds", bold=False),
        ),
        caption=("precision", "max_tokens", "queries", "documents", "machine", "date"),
        references=True,
    ),
    "static": Table(
        "static",
        split=("model", "set"),
        rows=Each(
            ("recipe", "layer", "dimensions", "precision"),
            (
                ("recipe", "{recipe}"),
                ("tokens read after layer", "{layer}"),
                ("dimensions", "{dimensions}"),
                ("precision", "{precision}"),
            ),
        ),
        columns=(
            Column("Spearman x 100"),
            Column("texts a second of one thread", show="speed", bold=False),
            Column("MiB of weights", show="size", bold=False),
        ),
        caption=("machine", "date"),
    ),
    "precision": Table(
        "scores",
        where={**TRAINED, **AT_ITS_END, "set": (*PAIRS, *WORD_SETS, *TITLES)},
        split=("model", "set", "metric"),
        rows=Each(RECIPES.fields, where={"precision": "float32"}),
        columns=(
            Column("float32", {"precision": "float32"}, bold=False),
            Column("bfloat16", {"precision": "bfloat16"}, bold=False),
        ),
        caption=("date",),
        whole=True,
    ),
    "measured": Table(
        "scores",
        rows=Each(("model", "precision", "versions")),
        columns=(Column("last measured", show="date"),),
        caption=(),
    ),
    "choose-best": Table(
        "scores",
        where=TRAINED,
        split=("model",),
        label="texts",
        rows=(
            *(Row(f"{pairs}, Spearman", {**SPEARMAN, "set": pairs}, chosen=dev(pairs)) for pairs in PAIRS),
            *(Row(f"{words}, accuracy, cosine", {"set": words, "metric": WORDS[1]}) for words in WORD_SETS),
            *(Row(titles, {"set": titles}) for titles in TITLES),
        ),
        columns=(
            Column("Classical, mean", {"recipe": "Classical", "pooling": ("mean", ""), **AT_ITS_END}, bold=False),
            Column("Classical, last", {"recipe": "Classical", "pooling": "last", **AT_ITS_END}, bold=False),
            Column("best recipe, as its authors read it", {**ANY_RECIPE, **AT_ITS_END}, bold=False),
            Column("best recipe, layer and filter", ANY_RECIPE, bold=False),
            Column("best control", ANY_CONTROL, bold=False),
            *(Column(model, {**AT_ITS_END, "model": model}, bold=False) for model in REFERENCES),
        ),
    ),
    "choose-recipes": Table(
        "scores",
        where={**TRAINED, **AT_ITS_END},
        split=("model",),
        rows=Each(("recipe", "pooling"), where={"set": (*PAIRS, *TITLES)}),
        columns=(
            *(Column(pairs, {"set": pairs, **SPEARMAN}, interval=False) for pairs in PAIRS),
            # Word embeddings do not depend on the pooling.
            *(
                Column(words, {"set": words, "metric": WORDS[1], "pooling": ("", "mean")}, interval=False)
                for words in WORD_SETS
            ),
            *(Column(titles, {"set": titles}, interval=False) for titles in TITLES),
        ),
        references=True,
    ),
    "filters": Table(
        "scores",
        where={**TRAINED, **SPEARMAN, "set": PAIRS, "layer": None},
        split=("model", "set"),
        rows=Each(("filter",), (("behind the pooling", "{filter}"),)),
        columns=(
            Column("Classical, mean", {"recipe": "Classical", "pooling": "mean"}),
            Column("Classical, last", {"recipe": "Classical", "pooling": "last"}),
            Column("Echo-2, mean", {"recipe": "Echo-2", "pooling": "mean"}),
            Column("PromptEOL", {"recipe": PROMPTEOL}),
            Column("bag of input embeddings", {"recipe": BAG}),
        ),
    ),
    "scores-of-the-page": Measured(
        Table(
            "scores",
            where={**TRAINED, **AT_ITS_END},
            split=("model",),
            rows=Each(RECIPES.fields, where={"set": (*PAIRS, *TITLES)}),
            columns=(
                *(Column(pairs, {"set": pairs, **SPEARMAN}) for pairs in PAIRS),
                *(Column(titles, {"set": titles}) for titles in TITLES),
            ),
        )
    ),
    "early-late": Table(
        "scores",
        where={**TRAINED, "layer": None},
        split=("model",),
        rows=(
            Row("Early and late", EARLY_LATE),
            Row("PromptEOL, last", {"recipe": "PromptEOL", "pooling": "last", "filter": ""}),
            Row("PromptEOL, last, whitened alike", {"recipe": "PromptEOL", "pooling": "last", "filter": PARTWISE}),
            Row("bag of input embeddings, whitened alike", {"recipe": BAG, "filter": PARTWISE}),
            Row("Classical, mean", {"recipe": "Classical", "pooling": "mean", "filter": ""}),
            Row("Classical, last", {"recipe": "Classical", "pooling": "last", "filter": ""}),
        ),
        columns=(
            *(Column(pairs, {"set": pairs, **SPEARMAN}) for pairs in PAIRS),
            *(Column(titles, {"set": titles}) for titles in TITLES),
        ),
    ),
    "freeze-paper": trained_on_states(
        Each(("method",), where={"method": PAPERS_ROWS}),
        Column("Pearson of its own similarity", {**PEARSON, **OWN}),
        Column("Spearman of its own similarity", {**SPEARMAN, **OWN}),
        method=PAPERS_ROWS,
        pairs=all_pairs,
    ),
    "freeze-ahead": trained_on_states(
        Each(("method", "layers", "width", "dimensions", "rate")),
        Column("Spearman of its own similarity", {**SPEARMAN, **OWN}),
        method=lambda method: method not in PAPERS_ROWS,
        pairs=all_pairs,
    ),
    "freeze-choice": Table(
        "freeze",
        where={"seed": 0, "set": tuple(map(dev, PAIRS)), "pairs": 1000},
        split=("model", "set"),
        rows=Each(
            ("layers", "width", "dimensions", "rate"), where={"method": lambda name: str(name).startswith("whitened")}
        ),
        columns=(
            Column("Spearman of the cosine", {**SPEARMAN, **COSINE}, interval=False),
            Column("Spearman of its own similarity", {**SPEARMAN, **OWN}, interval=False),
        ),
        caption=("pairs", "date"),
    ),
    "freeze-few": trained_on_states(
        Each(("method", "pairs"), (("method", "{method}"), ("labelled pairs", "{pairs}"))),
        Column("Spearman of its own similarity", {**SPEARMAN, **OWN}),
        method=(LOG_VARIANCE, LOG_VARIANCE_PROMPTED, WHITENED, WHITENED_FASTER),
    ),
    "freeze-picture": ByLabels(
        "freeze.svg",
        panels=(Panel(SMOLLM2, ENGLISH), Panel(GEMMA, CHINESE)),
        series=(
            Series("from a whitening, rate 1e-4: cosine", {"method": WHITENED, **COSINE}),
            Series("from a whitening, rate 1e-3: cosine", {"method": WHITENED_FASTER, **COSINE}),
            Series("the paper's, at a prompt's end: cosine", {"method": LOG_VARIANCE_PROMPTED, **COSINE}),
            Series("the paper's: its own similarity", {"method": LOG_VARIANCE, **OWN}),
        ),
        levels=(
            Series("Early and late, no labels", EARLY_LATE),
            Series("PromptEOL, whitened, no labels", {"recipe": PROMPTEOL, "pooling": "last", "filter": PARTWISE}),
            *(Series(f"{model}, trained", {"model": model, "filter": ""}) for model in REFERENCES),
        ),
    ),
    "held-out": Table(
        "held_out",
        where={"against": "", **FIRST},
        split=("model",),
        rows=Each(("recipe",), (("read by", "{recipe}"),)),
        columns=HELD_OUT,
        caption=("precision", "date"),
    ),
    "held-out-labelled": Table(
        "held_out",
        where={"against": "", "metric": TOLD_APART},
        split=("model", "metric"),
        rows=Each(("recipe",), (("read by", "{recipe}"),)),
        columns=(
            *(Column(name, {"set": f"{name} test"}) for name in LABELLED),
            Column("mean, English", {"set": of_all_labelled}),
        ),
        caption=("precision", "date"),
    ),
    "held-out-labelled-ahead": Table(
        "held_out",
        where={"recipe": ("echo-topic", "topic"), "set": of_all_labelled},
        split=("model",),
        rows=Each(
            ("recipe", "against"),
            (("read by", "{recipe}"), ("ahead of", "{against}")),
            where={"against": lambda name: name not in ("", "echo-topic")},
        ),
        columns=tuple(Column(metric, {"metric": metric}, show="ahead", bold=False) for metric in TOLD_APART),
        caption=("precision", "date"),
    ),
    "topic-and-means": Table(
        "held_out",
        where={"recipe": "echo-topic", "against": "echo-means"},
        rows=Each(("model", "metric"), where={"metric": ("Spearman", *TOLD_APART)}),
        columns=tuple(
            Column(name, {"set": f"{name} test"}, show="ahead", bold=False)
            for name in ("STS-B en", *LABELLED, "STS-B zh")
        ),
        caption=("precision", "date"),
    ),
    "held-out-ahead": Table(
        "held_out",
        where={"recipe": ("echo-topic", "topic"), "against": OTHERS, **FIRST},
        split=("model",),
        rows=Each(("recipe", "against"), (("read by", "{recipe}"), ("ahead of", "{against}"))),
        columns=tuple(replace(column, show="ahead", bold=False) for column in HELD_OUT),
        caption=("precision", "date"),
    ),
    "several-endings": Table(
        "several",
        where={"set": "mean"},
        rows=Each(("copies", "recipe"), (("copies", "{copies}"), ("asked for", "{recipe}"))),
        columns=(
            Column("mean", {"against": ""}, bold=False),
            Column("ahead of topic alone", {"against": "topic"}, "ahead", bold=False),
            Column("ahead of domain alone", {"against": "domain"}, "ahead", bold=False),
        ),
        caption=("model", "precision", "texts", "date"),
    ),
    "wordings": Spread(
        chosen=CHOSEN,
        compared={language: endings(language)[0].words for language in CHOSEN},
        where={"readout": "sum"},
    ),
    "beginnings": Spread(
        file="beginnings",
        by="layout",
        setting=("model", "language"),
        chosen=USUAL,
        compared={
            language: f"{words[0]}{{text}}{BETWEEN[language]}{{text}}"
            for language, words in (("en", WHOLE_EN), ("zh", WHOLE_ZH))
        },
        title="no words before",
    ),
    "tried": Table(
        "ablations",
        where={"recipe": "Echo topic"},
        split=("set",),
        rows=Each(("change",), (("changed", "{change}"),)),
        columns=tuple(
            column
            for model in (SMOLLM2, GEMMA)
            for column in (
                Column(model, {"model": model}, interval=False, bold=False),
                Column("ahead of it as it is", {"model": model}, show="difference", bold=False),
            )
        ),
        caption=("precision", "date"),
    ),
    "distil": Table(
        "distil",
        where={"set": ENGLISH},
        split=("model", "set", "corpus"),
        rows=Each(("student", "dimensions"), (("student", "{student}"), ("dimensions", "{dimensions}"))),
        columns=(
            Column("Spearman x 100"),
            Column("share of the teacher's, %", show="share", bold=False),
            Column("held-out texts: order of cosines", show="agreement", bold=False),
            Column("held-out texts: nearest ten", show="neighbours", bold=False),
            Column("processor seconds", show="seconds", bold=False),
        ),
        caption=("precision", "texts", "date"),
    ),
    "bellm": Table(
        "bellm",
        where={"seed": None},
        split=("model", "set", "triplets"),
        rows=Each(
            ("method", "turned", "reading", "precision"),
            (("method", "{method}"), ("turned", "{turned}"), ("read", "{reading}"), ("precision", "{precision}")),
        ),
        columns=(
            Column("Spearman x 100"),
            Column("ahead of no layer turned", show="ahead", bold=False),
            Column("trainings", show="seeds", bold=False),
            Column("compared", show="ahead_seeds", bold=False),
        ),
        caption=("date",),
    ),
    "jtcse": Table(
        "jtcse",
        where={"seed": None, "set": "STS-B en test", "model": "all-MiniLM-L6-v2"},
        rows=Each(("method", "steps"), (("trained further by", "{method}"), ("steps", "{steps}"))),
        columns=(
            Column("Spearman x 100"),
            Column("ahead of SimCSE", show="ahead", bold=False),
        ),
        caption=("model", "set", "precision", "texts", "date"),
    ),
    "cost-plain": costs("plain", ("time",), RATIO, Each(("precision",), (("", "{precision}"),))),
    "speed-targets": SPEED_TARGETS,
    "speed-precision": Table(
        "cost",
        where={"table": "precision"},
        split=("model", "machine"),
        rows=Each(("contender", "precision"), (("recipe", "{contender}"), ("backbone", "{precision}"))),
        columns=(
            Column("tokens of text/s", {"quantity": "tokens of text/s"}, show="cost"),
            Column("time / float32's", {"quantity": "time"}, show="cost"),
            Column("Spearman x 100", {"quantity": "Spearman x 100"}, show="points"),
            Column("less that of float32", {"quantity": "change of Spearman x 100"}, show="points"),
        ),
        caption=("batch", "how", "date", "versions"),
    ),
    "speed-compiled": Table(
        "cost",
        where={"table": "compiled"},
        split=("model", "machine"),
        rows=Each(("contender", "precision"), (("recipe", "{contender}"), ("backbone", "{precision}"))),
        columns=(
            Column("tokens of text/s", {"quantity": "tokens of text/s"}, show="cost"),
            Column("time / not compiled", {"quantity": "time"}, show="cost"),
            Column("processor seconds for the first texts", {"quantity": "seconds for the first texts"}, show="cost"),
        ),
        caption=("batch", "how", "date", "versions"),
    ),
    "cost-alone": costs(
        "alone",
        ("time",),
        Each(("precision", "contender", "unit"), (("ratio", "time: {contender} / {unit}, {precision}"),)),
        LENGTHS_BY_BATCH,
    ),
    "install-size": Table(
        "install",
        split=("system", "python"),
        rows=Each(("part",), (("", "{part}"),)),
        columns=(Column("packages", show="packages", bold=False), Column("MB", show="megabytes", bold=False)),
        caption=("date", "versions"),
    ),
    "speed-start": Table(
        "cost",
        where={"table": "start"},
        split=("machine",),
        rows=Each(("contender",), (("", "`{contender}`"),)),
        columns=(Column("processor time, ms", show="cost"),),
        caption=("how", "date", "versions"),
    ),
    "speed-releases": Table(
        "cost",
        where={"table": "releases"},
        split=("model", "machine"),
        rows=Each(("contender", "unit"), (("", "{contender}"), ("beside release", "{unit}"))),
        columns=(Column("time", show="cost"),),
        caption=("precision", "how", "date", "versions"),
    ),
    "speed-corpus": Table(
        "cost",
        where={"table": "corpus"},
        split=("model", "machine"),
        rows=Each(("quantity", "contender", "unit"), (("", "{quantity}"), ("of", "{contender}"), ("beside", "{unit}"))),
        columns=(Column("seen", show="cost"),),
        caption=("precision", "batch", "how", "date", "versions"),
    ),
    "speed-workers": Table(
        "cost",
        where={"table": "workers"},
        split=("model", "machine"),
        rows=Each(("contender",), (("", "{contender}"),)),
        columns=(Column("two at once / one", show="cost"),),
        caption=("precision", "batch", "how", "date", "versions"),
    ),
    "cost-beside-echo": costs("beside-echo", ("time",), RATIO, LENGTHS_BY_BATCH),
    "cost-step": costs("step", ("time",), RATIO, Each(("batch",), (("", "batches of {batch}"),))),
    "cost-prefixes": costs("prefixes", ("time",), RATIO, Each(("batch",), (("", "batches of {batch}"),))),
    "cost-short": costs("short", ("time",), RATIO, LENGTHS_BY_BATCH),
    "cost-limit": costs(
        "limit",
        ("share of the time", "share of the time by the profiler"),
        Each(("quantity", "contender"), (("", "{quantity}"), ("of Classical, mean", "{contender}"))),
        LENGTHS_BY_BATCH,
    ),
    "cost-repetition": costs("repetition", ("time", "peak memory of the process"), RATIO, LENGTHS, precision="float32"),
    # Where memory is a GPU's, all of them hold the same weights.
    "cost-gpu": costs("repetition", ("time", "peak memory of encoding"), RATIO, LENGTHS, precision="bfloat16"),
    "cost-kernel": Table(
        "cost",
        where={"table": "kernel", "quantity": "time of the maximum in a layer"},
        split=("machine",),
        rows=Each(("model", "contender"), (("layer", "{model}"), ("kernel / torch's operations", "{contender}"))),
        columns=LENGTHS,
        caption=("precision", "batch", "how", "date", "versions"),
    ),
    "cost-passes": costs("passes", ("time",), RATIO_BY_BATCH, LENGTHS),
    "cost-sweep": costs("sweep", ("time",), RATIO, LENGTHS_BY_BATCH),
    "cost-chunked": costs("chunked", ("time",), RATIO, LENGTHS),
    "cost-towers": costs("towers", ("time",), RATIO, SHAPES),
    "speed-repetition": costs("repetition", SPEEDS, SPEED, LENGTHS, "quantity"),
    "speed-chunked": costs("chunked", SPEEDS, SPEED, LENGTHS, "quantity"),
    "speed-encode": Table(
        "cost",
        where={"table": "encode"},
        split=("model", "machine"),
        rows=Each(("contender",), (("recipe", "{contender}"),)),
        columns=(
            Column("texts/s", {"quantity": "texts/s"}, show="cost"),
            Column("tokens of text/s", {"quantity": "tokens of text/s"}, show="cost"),
            Column("FLOP/s, as a share of a 1024 x 1024 matrix product's", {"quantity": "FLOP/s"}, show="cost"),
        ),
        caption=("precision", "tokens", "batch", "how", "date", "versions"),
    ),
    "speed-files": Table(
        "cost",
        where={"table": "files"},
        split=("machine",),
        rows=Each(("contender", "how"), (("reading and writing, one process", "{contender}"), ("", "{how}"))),
        columns=(Column("MB/s", show="cost"),),
        caption=("date", "versions"),
    ),
    "batches": Table(
        "batches",
        split=("model",),
        rows=Each(("module",)),
        columns=Each(("precision",)),
        caption=("date", "machine", "versions"),
    ),
    "serving": Table(
        "serving",
        split=("model",),
        rows=Each(("clients",)),
        columns=Each(("quantity",)),
        caption=("date", "machine", "versions"),
    ),
}
