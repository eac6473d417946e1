"""Files of a saved model, on this machine and on the Hub: they must not change while a run is interrupted."""

from __future__ import annotations

import json
import shlex
from glob import glob
from pathlib import Path, PurePosixPath

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from sentence_transformers.util import load_file_path

from ..hub.push import ENCODERS, model_class
from ..lm.gguf import is_gguf

_MODULES = "modules.json"
_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"


def model_files(model: str, revision: str | None) -> tuple[list[str], dict[str, Path]]:
    """Return all that decides what a model gives, with the base models of its adapters.

    Args:
        model: A directory, or a model on the Hub.
        revision: Its commit there.

    Returns:
        Models on the Hub, as ``name@commit``; and files on this machine, by names that do not tell where the model
        lies, without model cards and hidden files.

    Raises:
        ValueError: If a base model is not to be found.
    """
    commits, files = [], {}
    if Path(model).is_dir():
        files = _files(Path(model))
        adapters = [path for path in files.values() if path.name == _ADAPTER]
    else:
        commits = [f"{model}@{revision}"]
        modules = json.loads(Path(hf_hub_download(model, _MODULES, revision=revision)).read_text("utf-8"))
        name = (PurePosixPath(modules[0]["path"]) / _ADAPTER).as_posix()
        adapters = [Path(path)] if (path := load_file_path(model, name, revision=revision)) else []
    for adapter in adapters:
        base = str(json.loads(adapter.read_text("utf-8")).get("base_model_name_or_path"))
        if Path(base).is_dir():
            files.update({f"{base}: {name}": path for name, path in _files(Path(base).absolute()).items()})
        elif config := load_file_path(base, _CONFIG):
            commits.append(f"{base}@{Path(config).parent.name}")
        # The whole model may lie next to its adapter: then its base is not loaded.
        elif not (adapter.parent / _CONFIG).is_file():
            raise ValueError(
                f"{adapter} names a base model that is not to be found: {base} is no directory, and the Hub gives no "
                "such model."
            )
    return commits, files


def saved_commit(model: str, revision: str | None) -> str | None:
    """Return the commit that a revision stands for at this moment, on the Hub or, without a network, in its cache.

    Returns:
        None for a directory.

    Raises:
        ValueError: If there is no such directory and no such model; or it does not say how texts become vectors, as a
            bare language model; or it reads texts in pairs.
    """
    path = Path(model)
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"{model} is a directory: a revision is for models of the Hub.")
        if (path / _MODULES).is_file():
            if (kind := model_class(path)) not in ENCODERS:
                raise ValueError(f"{model} is a {kind}, which reads texts in pairs. Give one of {', '.join(ENCODERS)}.")
            return None
    elif not is_gguf(model):
        if found := load_file_path(model, _MODULES, revision=revision):
            return Path(found).parent.name
        try:
            hf_hub_download(model, _CONFIG, revision=revision)
        except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ValueError(
                f"{model}: there is no such directory, and the Hub gives no such model ({said}). Check the name, or "
                "give a directory that `st-reba build` or `save` has written."
            ) from None
    raise ValueError(
        f"{model} has no {_MODULES}: it is not a saved SentenceTransformer, and nothing says how texts become vectors. "
        "Give one that `st-reba build` or `save` has written. Of a language model make one first: "
        f"st-reba build --model {shlex.quote(model)} --out my-model"
    )


def _files(root: Path) -> dict[str, Path]:
    # Unlike Path.rglob, glob passes over hidden files, and follows links: a module's folder may be one.
    paths = [root / name for name in glob("**", root_dir=root, recursive=True) if not name.endswith(".md")]
    return {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
