"""Validation of the files of a saved model, which others may have written.

Errors of downloads are also raised here, with one message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple, NoReturn, TypeAlias

from huggingface_hub import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from packaging.version import InvalidVersion, Version

from ..lm.sizes import MAX_LAYERS, MAX_SIZE, MAX_TOKENS

#: Limit of a JSON file: configurations have some kilobytes, and an index of shards may have some megabytes.
MAX_BYTES = 2**26
_LEVELS = 64


# Reading


def read_json(path: Path) -> Any:
    """Read a JSON file of a model.

    Raises:
        ValueError: If the file is not JSON, is nested too deeply, is too large, or contains NaN.
        OSError: If the file cannot be read.
    """

    def constant(name: str) -> float:
        if name == "NaN":
            raise ValueError("NaN is no number")
        return float(name)

    if path.stat().st_size > MAX_BYTES:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, and at most {MAX_BYTES:,} are allowed. Download it again."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=constant)
        is_deep = _is_deep(content)
    except RecursionError:
        is_deep = True
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}). Download it again, or save the model again.") from None
    if is_deep:
        raise ValueError(f"{path} is nested more than {_LEVELS} levels deep. Download it again.")
    return content


def _is_deep(value: Any) -> bool:
    """Whether a value is nested so deeply that recursion over it might fail."""
    level = [value]
    for _ in range(_LEVELS):
        inner = [value for value in level if isinstance(value, (dict, list))]
        level = [part for value in inner for part in (value.values() if isinstance(value, dict) else value)]
    return bool(level)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model.

    Raises:
        ValueError: If the file contains anything else, or for the reasons of :func:`read_json`.
        OSError: If the file cannot be read.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is {shorten(content)}, and not an object of names and values. Save the model again.")
    return content


def check_values(values: Mapping[str, Any], schema: Schema, file: object, needed: Collection[str] = ()) -> None:
    """Check the values in a file.

    Args:
        values: Values in the file.
        schema: Settings to check. Values of other names are ignored.
        file: Name of the file in messages.
        needed: Names of the required settings.

    Raises:
        ValueError: If a value is not allowed, or a required one is missing.
    """
    for setting in schema:
        name = setting.name
        if name in values and not setting.allowed(values[name]):
            problem = f"{file} sets {name} to {shorten(values[name])}: {setting.advice}"
            raise ValueError(f"{problem} Correct the file, or save the model again.")
        if name in needed and name not in values:
            raise ValueError(f"{file} has no {name}. Save the model again.")


def shorten(value: Any) -> str:
    """Return a value for a message, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def quoted(key: str) -> str:
    """Return a name for a message, quoted and shortened if it is long or cannot be printed."""
    return key if key.isprintable() and len(key) <= 80 else shorten(key)


# Paths


def is_inside(path: str) -> bool:
    """Whether a path stays below its start, by the rules of any operating system."""
    parts = PureWindowsPath(path)
    return not parts.anchor and ".." not in parts.parts and "\0" not in path


def check_inside(path: str, file: object = "modules.json", noun: str = "module") -> str:
    """Return a path that a file names, if it stays inside the model.

    Raises:
        ValueError: If the path leads out of the model.
    """
    if not is_inside(path) or (noun == "file" and not path):
        root = ', or "" for the model\'s own directory' if noun == "module" else ""
        raise ValueError(
            f"{file} has the path {shorten(path)}: a {noun} lies inside its model, so give a relative path without "
            f'".."{root}.'
        )
    return path


def leaves(path: Path, root: Path) -> bool:
    """Whether a path leads out of a directory when links are followed.

    In the Hub's cache, links of a model's files to blobs, ``snapshots/<commit>/file -> ../../blobs/<hash>``, do not.
    """
    root = root.resolve()
    target = path.resolve()
    if target.is_relative_to(root):
        return False
    snapshot = next((folder for folder in (root, *root.parents) if folder.parent.name == "snapshots"), None)
    return snapshot is None or target.parent != snapshot.parent.parent / "blobs"


def check_link(path: Path, root: Path) -> None:
    """Check that a file of a model is not a link to a file outside.

    Raises:
        ValueError: If the file is such a link.
    """
    if leaves(path, root):
        raise ValueError(
            f"{path} is a link to {path.resolve()}, outside the model: put the file itself there, or remove the link."
        )


# Schemas


class Setting(NamedTuple):
    """Setting in a file.

    Attributes:
        name: Its name.
        allowed: Function that returns whether a value of any type is allowed.
        advice: Allowed values, as the end of an error message.
    """

    name: str
    allowed: Callable[[Any], bool]
    advice: str


Schema: TypeAlias = Sequence[Setting]

_KINDS: dict[type, str] = {str: "a string", dict: "an object of names and values", list: "a list"}


def _optional(setting: Setting) -> Setting:
    """Return the setting with None as another allowed value."""
    return setting._replace(allowed=lambda value: value is None or setting.allowed(value))


def _int(name: str, least: int, most: int) -> Setting:
    message = f"give a whole number from {least} to {most}."
    return Setting(name, lambda value: type(value) is int and least <= value <= most, message)


def _a(kind: type, name: str) -> Setting:
    return Setting(name, lambda value: isinstance(value, kind), f"it must be {_KINDS[kind]}.")


def _many(kind: type, setting: Setting) -> Setting:
    """Return the setting for a list or an object of values that the given setting allows."""

    def allowed(value: Any) -> bool:
        values: Any = value.values() if isinstance(value, dict) else value
        return isinstance(value, kind) and all(map(setting.allowed, values))

    return Setting(setting.name, allowed, f"it must be {_KINDS[kind]}, and for each value, {setting.advice}")


def _file(name: str) -> Setting:
    message = 'a file lies inside its model, so give a relative path without "..".'
    return Setting(name, lambda value: isinstance(value, str) and value != "" and is_inside(value), message)


def _is_version(value: Any) -> bool:
    try:
        Version(value)
    except (InvalidVersion, TypeError):
        return False
    return True


def _are_attention_types(value: Any) -> bool:
    """Whether a value lists GPT-Neo's kinds of attention, each list with its number of repetitions."""
    try:
        return 0 <= sum(len(kinds) * count for kinds, count in value or []) <= MAX_LAYERS
    except (TypeError, ValueError):
        return False


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and int(key[:20]) < MAX_TOKENS


def _is_pooling(value: Any) -> bool:
    return all(isinstance(mode, str) for mode in (value if isinstance(value, list) else [value]))


def _reads_text(value: Any) -> bool:
    """Whether text is read by ``forward``, as ST calls any method of the backbone that a file names."""
    text = value.get("text") if isinstance(value, dict) else None
    return (
        isinstance(text, dict) and text.get("method") == "forward" and isinstance(text.get("method_output_name"), str)
    )


_MODULE = (_a(str, "type"), _a(str, "path"), _a(str, "name"))
# Without ``requirements``, which ST checks itself.
_SENTENCE_TRANSFORMERS = (
    _many(dict, _optional(_a(str, "prompts"))),
    _optional(_a(str, "default_prompt_name")),
    _optional(_a(str, "similarity_fn_name")),
    _a(str, "model_type"),
    _a(dict, "__version__"),
)
_VERSIONS: Schema = [Setting("sentence_transformers", _is_version, "it must be a version, such as 6.2.0.")]
#: ``config.json`` of ST's ``Pooling``. Before ST 6, each mode had its own key.
_POOLING: Schema = (
    _optional(_int("embedding_dimension", 1, MAX_SIZE)),
    _optional(_int("word_embedding_dimension", 1, MAX_SIZE)),
    Setting("pooling_mode", _is_pooling, "it must be a string, or a list of strings."),
)
_ROUTER: Schema = (_many(dict, _a(str, "types")),)
_SHARDS = (_a(dict, "metadata"), _many(dict, _a(str, "weight_map")))
#: Values of a backbone's ``config.json`` that are read before transformers loads it.
LANGUAGE_MODEL: Schema = (
    _optional(_many(list, _a(str, "architectures"))),
    Setting(
        "attention_types", _are_attention_types, f"give lists of kinds with a number each, for {MAX_LAYERS} layers."
    ),
    _optional(_a(dict, "text_config")),
    _optional(_file("transformers_weights")),
    _many(list, _file("configuration_files")),
)
#: ``adapter_config.json`` of peft.
ADAPTER: Schema = (
    _optional(_a(str, "base_model_name_or_path")),
    _optional(_int("r", 0, MAX_SIZE)),
    _many(dict, _int("rank_pattern", 0, MAX_SIZE)),
    _optional(_many(list, _many(list, _int("layer_replication", 0, MAX_LAYERS)))),
    Setting("megatron_config", lambda value: value is None, "it names a module to import: use null."),
)
#: ``tokenizer_config.json``.
TOKENIZER: Schema = (
    _many(list, _file("fast_tokenizer_files")),
    _many(dict, _a(dict, "added_tokens_decoder")),
    Setting(
        "added_tokens_decoder",
        lambda tokens: all(map(_is_token_id, tokens)),
        f"its keys must be ids of tokens, from 0 to {MAX_TOKENS - 1}.",
    ),
)
#: Values of ``sentence_bert_config.json`` that are not settings of a module. The last three are former names of ST.
TRANSFORMER: Schema = (
    _a(str, "module_output_name"),
    Setting("modality_config", _reads_text, "it must have text read by the method forward, with a method_output_name."),
    _a(str, "transformer_task"),
    *(_a(dict, f"{kind}_kwargs") for kind in ("processing", "model", "processor", "config")),
    *(_a(dict, f"{kind}_args") for kind in ("model", "tokenizer", "config")),
)


# Whole files


def read_modules(file: Path) -> list[dict[str, Any]]:
    """Read a ``modules.json``, whose entries have a ``type``, a ``path`` and a ``name``.

    Raises:
        ValueError: If the file is malformed, or a module lies outside the model.
    """
    content = read_json(file)
    if not content or not _many(list, _a(dict, "")).allowed(content):
        raise ValueError(
            f"{file} is {shorten(content)}: it must be a list of modules, at least one. Save the model again."
        )
    entries: list[dict[str, Any]] = content
    for number, entry in enumerate(entries):
        check_values(entry, _MODULE, f"{file}, module {number},", needed=("type", "path", "name"))
        check_inside(entry["path"], file)
    return entries


def shards_of(index: Path) -> dict[str, str]:
    """Return the files of weights by the weights' names, which an index in the same folder lists.

    Args:
        index: Index file, such as ``model.safetensors.index.json``.

    Raises:
        ValueError: If the index is malformed, or names a file outside its folder.
    """
    content = read_object(index)
    check_values(content, _SHARDS, index, needed=("weight_map",))
    shards: dict[str, str] = content["weight_map"]
    if not shards:
        raise ValueError(f"{index} names no file of weights. Download it again, or save the model again.")
    for name in sorted(set(shards.values())):
        check_inside(name, index, "file")
        check_link(index.parent / name, index.parent)
    return shards


def read_settings(directory: Path) -> dict[str, Any]:
    """Read the ``config_sentence_transformers.json`` of a model, or return an empty dictionary if there is none.

    Raises:
        ValueError: If the file is malformed.
    """
    file = directory / "config_sentence_transformers.json"
    settings = read_object(file) if file.is_file() else {}
    check_values(settings, _SENTENCE_TRANSFORMERS, file)
    check_values(settings.get("__version__", {}), _VERSIONS, file)
    prompts, default = settings.get("prompts", {}), settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ValueError(
            f"{file} has the default_prompt_name {shorten(default)}, and the prompts {shorten(sorted(prompts))}: give "
            "one of these, or remove it."
        )
    return settings


def check_saved(directory: Path) -> list[dict[str, Any]]:
    """Check the files of a saved model that ST reads, without loading it.

    The modules of st_reba check their own files when they are loaded.

    Args:
        directory: Directory of the model, which may be missing.

    Returns:
        Entries of its ``modules.json``, or an empty list if there is none.

    Raises:
        ValueError: If a file is malformed, or names a removed class.
    """
    modules = directory / "modules.json"
    if not modules.is_file():
        return []
    entries = read_modules(modules)
    check_classes([entry["type"] for entry in entries], directory)
    read_settings(directory)
    for entry in entries:
        config = directory / entry["path"] / "config.json"
        if entry["type"].endswith(".Pooling") and config.is_file():
            check_values(read_object(config), _POOLING, config)
        routes = directory / entry["path"] / "router_config.json"
        if entry["type"].endswith(".Router") and routes.is_file():
            router = read_object(routes)
            check_values(router, _ROUTER, routes)
            check_classes(router.get("types", {}).values(), directory)
    return entries


# Classes and settings removed in 1.0, which saved models of 0.8 may have


#: Removed classes of ``st_reba.modules``.
REMOVED_CLASSES = (
    "EchoLayersModule",
    "HierarchicalTokenPrependingModule",
    "MoEEModule",
    "RerankModule",
)
#: Removed settings of modules, with their defaults in 0.8.
REMOVED_SETTINGS: dict[str, Any] = {"chunk_length": None, "readout": "layer", "without_sink": False, "changes": []}

_REMOVED = "removed in 1.0: load it with st_reba 0.8."


def refuse_class(name: str, model: object, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error in place of loading a removed class.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{model} is of {name}, {_REMOVED}")


def check_classes(references: Iterable[object], model: object) -> None:
    """Check that a saved model has no removed class.

    Args:
        references: Types of its modules in its files.
        model: Name of the model in messages.

    Raises:
        ValueError: If a class has been removed.
    """
    removed = {f"st_reba.modules.{name}": name for name in REMOVED_CLASSES}
    for reference in references:
        if isinstance(reference, str) and reference in removed:
            refuse_class(removed[reference], model)


def is_no_sink(settings: Mapping[str, Any]) -> bool:
    """Whether a saved CausalTransformer is now a ``NoSinkModule``, which 0.8 saved as its only change."""
    changes = settings.get("changes")
    change = changes[0] if isinstance(changes, list) and len(changes) == 1 else None
    names = {"key", "layers", "bidirectional_layers"}
    return isinstance(change, dict) and change.keys() == names and change["key"] == "no-sink"


def without_removed(
    settings: dict[str, Any], module: str, file: str, removed: Mapping[str, Any] = REMOVED_SETTINGS
) -> dict[str, Any]:
    """Return the settings of a saved module without removed ones.

    Args:
        settings: Settings in the file.
        module: Name of the module's class.
        file: Name of the file in messages.
        removed: Removed settings with their defaults in 0.8.

    Raises:
        ValueError: If a removed setting does not have its default value.
    """
    if module == "NoSinkModule" and is_no_sink(settings):
        (change,) = settings["changes"]
        settings = {name: value for name, value in {**settings, **change}.items() if name not in ("changes", "key")}
    for name, default in removed.items():
        if settings.get(name, default) != default:
            raise ValueError(f"{file} sets {name} to {settings[name]!r:.80}, a setting of {module}, {_REMOVED}")
    return {name: value for name, value in settings.items() if name not in removed}


# Errors of downloads


#: Errors of models that cannot be downloaded.
_HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled)


@contextmanager
def fetching(model: str) -> Iterator[None]:
    """Raise the errors of libraries for a model that cannot be downloaded as an OSError with one message.

    Raises:
        OSError: If the model cannot be downloaded.
    """
    try:
        yield
    except OSError as error:
        cause = error.__cause__ or error.__context__ or error
        if Path(model).is_dir() or not isinstance(cause, _HUB_ERRORS):
            raise
        missing = f"The model {model}: there is no such {'file' if model.endswith('.gguf') else 'directory'}"
        if isinstance(cause, HFValidationError):
            raise OSError(f"{missing}. Check the path, or give a Hub id (org/name).") from None
        reason = "HF_HUB_OFFLINE is set, and the model is not in the cache"
        if not is_offline_mode():
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        raise OSError(
            f"{missing}, and it cannot be downloaded from the Hub ({reason}). Check the name, or give a directory."
        ) from None
