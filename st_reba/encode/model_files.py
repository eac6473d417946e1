"""What a saved model is made of, on this machine and on the Hub: what must not change while a run is interrupted."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path, PurePosixPath

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from ..hub.push import model_class

_MODULES = "modules.json"
_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"


def model_files(model: str, revision: str | None) -> dict[str, Path | None]:
    """All that decides what a model gives, with the base models of its adapters.

    Args:
        model: A directory, or a model on the Hub.
        revision: Its commit there.

    Returns:
        Files on this machine, by names that do not tell where the model lies, without model cards and hidden files;
        and models on the Hub, as ``name@commit``, which have no file here.

    Raises:
        ValueError: If a base model is not to be found.
    """
    found: dict[str, Path | None] = {}
    if Path(model).is_dir():
        own = _files(Path(model))
        adapters = [path for path in own.values() if path.name == _ADAPTER]
        found.update(own)
    else:
        found[f"{model}@{revision}"] = None
        adapters = _adapters_on_the_hub(model, revision)
    for adapter in adapters:
        base = str(json.loads(adapter.read_text("utf-8")).get("base_model_name_or_path"))
        if Path(base).is_dir():
            found.update({f"{base}: {name}": path for name, path in _files(Path(base).absolute()).items()})
            continue
        try:
            found[f"{base}@{_commit(base, None, _CONFIG)}"] = None
        except ValueError as error:
            # The whole model may lie beside its adapter: then its base is not loaded.
            if not (adapter.parent / _CONFIG).is_file():
                raise ValueError(f"{adapter} names a base model that is not to be found. {error}") from None
    return found


def check_saved(directory: Path) -> None:
    """See that a directory says how texts become vectors.

    Raises:
        ValueError: If it is a bare language model, or no model, or one that does not give a text one vector.
    """
    if not (directory / _MODULES).is_file():
        raise not_saved(str(directory), (directory / _CONFIG).is_file())
    if (kind := model_class(directory)) != "SentenceTransformer":
        raise ValueError(
            f"{directory} is a {kind}, and `st-reba encode` writes one vector a text, of a SentenceTransformer. Load "
            f'it with {kind}("{directory}") after import st_reba.'
        )


def saved_commit(model: str, revision: str | None) -> str:
    """The commit that a revision stands for at this moment: on the Hub, or in its cache without a network.

    Raises:
        ValueError: If there is no such model, or it is a bare language model.
    """
    try:
        return _commit(model, revision, _MODULES)
    except ValueError:
        _commit(model, revision, _CONFIG)
        raise not_saved(model, True) from None


def _files(root: Path) -> dict[str, Path]:
    files = {}
    seen = set()
    # A module's folder may be a link to another directory, which rglob would pass over.
    for folder, folders, names in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.suffix != ".md" and path.is_file():
                files[path.relative_to(root).as_posix()] = path
    return files


def _adapters_on_the_hub(model: str, revision: str | None) -> list[Path]:
    """The settings of the first module's adapter, if it has one."""
    modules = json.loads(Path(hf_hub_download(model, _MODULES, revision=revision)).read_text("utf-8"))
    name = (PurePosixPath(modules[0]["path"]) / _ADAPTER).as_posix()
    try:
        return [Path(hf_hub_download(model, name, revision=revision))]
    except EntryNotFoundError:
        return []


def _commit(model: str, revision: str | None, name: str) -> str:
    """The commit of a model, by a file that it must have."""
    try:
        return Path(hf_hub_download(model, name, revision=revision)).parent.name
    except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    raise ValueError(
        f"{model}: there is no such directory, and the Hub gives no such model ({said}). Check the name, or give a "
        "directory that `st-reba build` or `save` has written."
    )


def not_saved(model: str, is_model: bool) -> ValueError:
    """The refusal of a directory or file that does not say how texts become vectors."""
    said = f"{model} has no {_MODULES}: it is not a saved SentenceTransformer"
    if not is_model:
        return ValueError(f"{said}. Give one that `st-reba build` or `save` has written.")
    return ValueError(
        f"{said}, and nothing says how its states become vectors. Make one of it first: "
        f"st-reba build --model {shlex.quote(model)} --method reba --pooling mean --out my-model"
    )
