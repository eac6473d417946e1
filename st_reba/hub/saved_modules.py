"""Settings of saved modules, and notes for programs that find one."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self

from sentence_transformers.base.modules import Module
from transformers import AutoConfig, PreTrainedConfig, utils

from ..hub import saved_files
from ..hub.push import loading_class
from ..hub.saved_files import check_inside, check_values, quoted, read_object, shorten, without_removed
from ..version import REQUIREMENT
from .checkpoints import Files, is_dtype, is_plain_attention

#: Arguments of ``load`` that say where the files of a model on the Hub are.
ON_THE_HUB = ("token", "cache_folder", "revision", "local_files_only")

# Arguments of transformers that a file of settings may give.
_ARGUMENTS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "model_kwargs": {"attn_implementation": is_plain_attention, "dtype": is_dtype, "torch_dtype": is_dtype},
    "processor_kwargs": {"model_max_length": lambda value: type(value) is int},
    "config_kwargs": {},
}
# Former names of these, which sentence-transformers still reads.
_FORMER_NAMES = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}
# Settings that earlier versions of sentence-transformers wrote.
_FORMER_SETTINGS = ("do_lower_case", "max_seq_length", "unpad_inputs")


def saved_settings(
    module: type[Module],
    model_name_or_path: str | PathLike[str],
    subfolder: str,
    kwargs: Mapping[str, Any],
    removed: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Read the settings of a saved module without a language model.

    Args:
        module: Its class.
        model_name_or_path: A directory or a Hub id.
        subfolder: Path of the module in it.
        kwargs: Arguments of ``load``; those of :data:`ON_THE_HUB` are used.
        removed: Settings that 1.0 removed, each with its default in 0.8.

    Returns:
        The settings; the arguments that say where the module's other files are; and the name of the place.

    Raises:
        ValueError: If ``subfolder`` leads out of the model, or a setting is none of this class's, or a removed one has
            another value.
    """
    where = {"subfolder": check_inside(subfolder)} | {name: kwargs[name] for name in ON_THE_HUB if name in kwargs}
    name = fspath(model_name_or_path)
    place = "/".join(filter(None, (name, subfolder)))
    path = module.load_file_path(name, module.config_file_name, **where)
    file = f"{place}/{module.config_file_name}"
    settings = {} if path is None else read_object(Path(path))
    settings = without_removed(settings, module.__name__, file, removed or {})
    check_settings(settings, module.config_keys, module.__name__, file)
    return settings, where, place


def check_settings(settings: Iterable[str], known: Collection[str], module: str, file: str) -> None:
    """Raise if a module of a class could not have saved a setting.

    Args:
        settings: Names of a module's settings in its file.
        known: Names of the class's settings.
        module: Name of the class.
        file: Name of the file.

    Raises:
        ValueError: If there is one that is not known.
    """
    for name in settings:
        if name not in known:
            raise ValueError(
                f"{file} sets {quoted(name)}, which is no setting of {module}: a saved one has "
                f"{', '.join(sorted(known)) or 'none'}. Remove it from the file, or save the model again."
            )


def check_transformer_settings(settings: Mapping[str, Any], known: Collection[str], module: str, file: str) -> None:
    """Raise as :func:`check_settings`, for a module with a language model, whose file may have arguments of its own.

    Raises:
        ValueError: If it gives an argument that is not allowed, or lets another method than ``forward`` read text.
    """
    kinds = {name: _FORMER_NAMES.get(name, name) for name in (*_ARGUMENTS, *_FORMER_NAMES)}
    check_settings(settings, {*known, *_FORMER_SETTINGS, *kinds}, module, file)
    check_values(settings, saved_files.TRANSFORMER, file)
    for name, kind in kinds.items():
        allowed = _ARGUMENTS[kind]
        for argument, value in settings.get(name, {}).items():
            if argument not in allowed or not allowed[argument](value):
                names = f"{', '.join(sorted(allowed))}, within bounds" if allowed else "nothing"
                raise ValueError(
                    f"{file} sets {quoted(argument)} in {name} to {shorten(value)}, which a file may not: there it may "
                    f"set {names}. Remove it from the file; if you trust the model, pass {kind}="
                    f"{{{argument!r}: ...}} yourself."
                )


def note_requirement(directory: Path) -> None:
    """Note in the configuration that sentence-transformers has written that st_reba is needed to load the model.

    Args:
        directory: Directory of the module: the model's own, or one right below it.
    """
    for root in (directory, directory.parent):
        path = root / "config_sentence_transformers.json"
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
            config["requirements"] = {**config.get("requirements", {}), **REQUIREMENT}
            path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
            _note_in_root(root, directory)
            return


def _note_in_root(root: Path, directory: Path) -> None:
    """Write a ``config.json`` that names st_reba, for programs that look for a language model in a model's root.

    Only a first module in a directory of its own gets it. An existing file stays; but one of ours would be taken for
    the base model of an adapter that is now in the root.
    """
    config = root / utils.CONFIG_NAME
    if (root / "adapter_config.json").is_file():
        if _is_noted(config):
            config.unlink()
    elif directory != root and directory.name.startswith("0_") and not config.exists():
        note = {"load_with": "sentence-transformers, after import st_reba", "model_type": SavedModelConfig.model_type}
        config.write_text(json.dumps(note, indent=2), encoding="utf-8")


def _is_noted(config: Path) -> bool:
    return config.is_file() and read_object(config).get("model_type") == SavedModelConfig.model_type


class SavedModelConfig(PreTrainedConfig):
    """Configuration in the root of a saved model, which is not a model of transformers."""

    model_type = "st_reba"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """Raise an error that says how to load the model.

        Raises:
            ValueError: Always.
        """
        name = str(kwargs.get("name_or_path"))
        kind = loading_class(name) or "SentenceTransformer"
        message = f'{name} is a {kind} of st_reba, not a language model: load it with {kind}("{name}").'
        files = Files(name, kwargs)
        if modules := files.find("modules.json"):
            folder = saved_files.read_modules(modules)[0]["path"]
            inner = files.find(f"{folder}/{utils.CONFIG_NAME}")
            if inner is not None and "model_type" in read_object(inner):
                message += f" Its language model is in the folder {folder}."
        raise ValueError(message)


AutoConfig.register(SavedModelConfig.model_type, SavedModelConfig, exist_ok=True)


def backbone_of(name_or_path: str | PathLike[str]) -> str:
    """Return the path of the language model of a saved model that has it in a directory of its own; any other as it is.

    Args:
        name_or_path: A directory, or a Hub id.

    Raises:
        ValueError: If its ``modules.json`` is malformed, or leads out of the model.
    """
    root = Path(name_or_path)
    config, modules = root / utils.CONFIG_NAME, root / "modules.json"
    if not modules.is_file() or (config.is_file() and not _is_noted(config)):
        return fspath(name_or_path)
    inner = root / saved_files.read_modules(modules)[0]["path"]
    return str(inner) if (inner / utils.CONFIG_NAME).is_file() else fspath(name_or_path)
