"""What a command refuses before it imports anything large: by the standard library alone, in milliseconds.

Whatever runs afterwards has the last word: it knows the model, and what packages of others have registered.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from .options import STAND_IN

#: Which recipes, filters, changes and templates there are, as ``make tables`` writes it from the rows of the recipes.
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


def check_free(out: Path | None, option: str) -> None:
    """Refuse a directory that already holds something; None: nothing is written.

    Raises:
        ValueError: If something lies there already.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory: choose another {option}, or remove it.")


def check_file(path: Path | None, option: str) -> None:
    """Refuse what is no file to read; None: nobody asks for one.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is a directory.
    """
    if path is not None and path.is_dir():
        raise ValueError(f"{option} {path} is a directory: give a file.")
    if path is not None and not path.exists():
        raise FileNotFoundError(f"{option} {path}: there is no such file. Check the name.")


def check_source(source: str | None) -> None:
    """Refuse a file, a folder or a pattern of texts that can only be on this machine, and is not.

    Raises:
        FileNotFoundError: If it is not there.
    """
    if source is None or "://" in source or Path(source).exists():
        return
    if has_magic(source):
        if not glob(source):
            raise FileNotFoundError(f"{source}: no file has such a name.")
        return
    if Path(source).suffix.lower() in _TABLES or not _HUB_NAME.fullmatch(source):
        raise FileNotFoundError(f"{source}: there is no such file. Check the name.")


def check_model(model: str) -> None:
    """Refuse what is neither a directory with a model, nor a GGUF file, nor may be a Hub id, nor the stand-in.

    Raises:
        ValueError: If it is another file, or a directory without a model, or can only be a path and nothing is there.
    """
    path = Path(model)
    if model == STAND_IN:
        return
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
    elif model.lower().endswith(".gguf") or _GGUF_TAG.fullmatch(model):
        return
    elif model.startswith((".", "/", "~", "\\")) or "\\" in model or model.count("/") > 1:
        raise ValueError(f"The model {model}: there is no such directory. Check the path, or give a Hub id (org/name).")


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
    keys = {_any_number(key) for key in [*names()["recipes"], *names()["changed"]]}
    parts = names()["filters"]
    for recipe in (key.strip() for asked in recipes for key in asked.split(",")):
        found = _KEY.fullmatch(recipe)
        if found is None or recipe in ("few", "all"):
            continue
        if _any_number(found["key"]) not in keys or found["part"] not in (None, *parts):
            known = [*names()["recipes"], *names()["changed"]]
            if _any_number(found["key"]) in keys:
                known = [f"{found['key']}+{part}" for part in parts]
            near = get_close_matches(recipe, known, n=3)
            raise ValueError(
                f"There is no recipe {recipe!r}. {'Near it: ' + ', '.join(near) + '. ' if near else ''}A key is one of "
                f"{', '.join(names()['recipes'])}; it may go on with @LAYER, and with one of "
                f"{', '.join(f'+{part}' for part in parts)}."
            )
        depth = _depth(Path(model))
        if found["layer"] and depth is not None and not 1 <= int(found["layer"]) <= depth:
            raise ValueError(f"{recipe}: {model} has {depth} layers. Give a layer from 1 to {depth}.")


def check_template(template: str | None) -> None:
    """Refuse a template without ``{text}`` that is not the name of one either; None: nobody gives one.

    Raises:
        ValueError: If it is neither.
    """
    if template is None or "{text}" in template or template in names()["templates"]:
        return
    near = get_close_matches(template, names()["templates"], n=3)
    raise ValueError(
        f"The template {template!r} has no {{text}}, where the input goes, and is not the name of one. "
        f"{'Near it: ' + ', '.join(near) + '. ' if near else ''}Names are {', '.join(names()['templates'])}."
    )


@cache
def names() -> dict[str, list[str]]:
    """What :data:`NAMES` has: ``recipes``, those ``changed``, ``filters`` and ``templates``."""
    found: dict[str, list[str]] = json.loads(NAMES.read_text(encoding="utf-8"))
    return found


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
            depths = [config[name] for name in _DEPTHS if isinstance(config.get(name), int)]
            return depths[0] if depths else None
    return None


def _beginning(path: Path, size: int) -> bytes:
    with path.open("rb") as stream:
        return stream.read(size)
