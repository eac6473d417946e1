"""What the files of a saved model may say: each is read here, held to what it may set, and refused in a sentence.

Files of a model are somebody else's text. A model that is not to be had is refused in a sentence, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any, NoReturn, TypeAlias

from huggingface_hub import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from packaging.version import InvalidVersion, Version

from ..lm.sizes import MAX_LAYERS, MAX_SIZE, MAX_TOKENS
from ..settings import Setting, optional, whole

#: Configurations have some kilobytes; an index of shards may have some megabytes.
MAX_BYTES = 2**26
_LEVELS = 64


# Reading


def read_json(path: Path) -> Any:
    """What a JSON file of a model says.

    Raises:
        ValueError: If it is not JSON, is nested too deeply to be read, is far too large, or has NaN for a number.
        OSError: If it cannot be read.
    """

    def constant(name: str) -> float:
        if name == "NaN":
            raise ValueError("NaN is no number")
        return float(name)

    if path.stat().st_size > MAX_BYTES:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, and at most {MAX_BYTES:,} are read. Fetch it again."
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=constant)
        is_deep = _is_deep(found)
    except RecursionError:
        is_deep = True
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}). Fetch it again, or save the model again.") from None
    if is_deep:
        raise ValueError(f"{path} is nested more than {_LEVELS} levels deep: no file of a model is. Fetch it again.")
    return found


def _is_deep(value: Any) -> bool:
    """Whether a value is nested so deeply that what looks at it might not come to an end."""
    level = [value]
    for _ in range(_LEVELS):
        inner = [value for value in level if isinstance(value, (dict, list))]
        level = [part for value in inner for part in (value.values() if isinstance(value, dict) else value)]
    return bool(level)


def read_object(path: Path) -> dict[str, Any]:
    """The same of a file that holds an object of names and values.

    Raises:
        ValueError, OSError: As :func:`read_json`, or if it holds anything else.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is {shown(found)}, and not an object of names and values. Save the model again.")
    return found


def check_values(found: Mapping[str, Any], schema: Schema, file: object, needed: Collection[str] = ()) -> None:
    """Hold what a file says to what it may set.

    Args:
        found: What it says.
        schema: What it may set; values of other names are left to who reads them.
        file: What the file is called.
        needed: What it has to set.

    Raises:
        ValueError: If it does not, with the file and the name; if a value may not stand, also with what is allowed.
    """
    for setting in schema:
        name = setting.name
        if name in found and not setting.allowed(found[name]):
            raise ValueError(
                f"{file} sets {name} to {shown(found[name])}: {setting.says} Correct the file, or save the model again."
            )
        if name in needed and name not in found:
            raise ValueError(f"{file} has no {name}, which a saved model has. Save the model again.")


def shown(value: Any) -> str:
    """A value of a file, as a message quotes it: cut short, for it may be long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def quoted(key: str) -> str:
    """A name that a file gives, as a message has it: in quotes and cut short where it is long or cannot be printed."""
    return key if key.isprintable() and len(key) <= 80 else shown(key)


# Paths


def is_inside(path: str) -> bool:
    """Whether a path that a file names stays below where it starts, by the rules of any system."""
    parts = PureWindowsPath(path)
    return not parts.anchor and ".." not in parts.parts and "\0" not in path


def check_inside(path: str, file: object = "modules.json", what: str = "module") -> str:
    """Refuse a path in a file that leads out of the model (of a module, later STs do so, too).

    Raises:
        ValueError: If it does.
    """
    if not is_inside(path) or (what == "file" and not path):
        own = ', or "" for the model\'s own directory' if what == "module" else ""
        raise ValueError(
            f"{file} has the path {shown(path)}: a {what} lies inside its model, so give a relative path without "
            f'".."{own}.'
        )
    return path


def leaves(path: Path, root: Path) -> bool:
    """Whether a path, followed through all links, leads out of a directory.

    In the Hub's cache a model is a directory of links to blobs, ``snapshots/<commit>/file -> ../../blobs/<hash>``:
    these belong to it.
    """
    root = root.resolve()
    target = path.resolve()
    if target.is_relative_to(root):
        return False
    snapshot = next((place for place in (root, *root.parents) if place.parent.name == "snapshots"), None)
    return snapshot is None or target.parent != snapshot.parent.parent / "blobs"


def check_link(path: Path, root: Path) -> None:
    """Refuse a file of a model that is a link to something outside of it.

    Raises:
        ValueError: If it is one.
    """
    if leaves(path, root):
        raise ValueError(
            f"{path} is a link to {path.resolve()}, outside the model: put the file itself there, or remove the link."
        )


# What files may set

Schema: TypeAlias = Sequence[Setting[Any]]

_KINDS: dict[type, str] = {str: "a string", dict: "an object of names and values", list: "a list"}


def _a(kind: type, name: str) -> Setting[Any]:
    return Setting(name, lambda value: isinstance(value, kind), f"it must be {_KINDS[kind]}.")


def _many(kind: type, setting: Setting[Any]) -> Setting[Any]:
    """A list or an object, each value in which may stand alone."""

    def allowed(value: Any) -> bool:
        values: Any = value.values() if isinstance(value, dict) else value
        return isinstance(value, kind) and all(map(setting.allowed, values))

    return Setting(setting.name, allowed, f"it must be {_KINDS[kind]}, and of each value: {setting.says}")


def _file(name: str) -> Setting[Any]:
    says = 'a file lies inside its model, so give a relative path without "..".'
    return Setting(name, lambda value: isinstance(value, str) and value != "" and is_inside(value), says)


def _is_version(value: Any) -> bool:
    try:
        Version(value)
    except (InvalidVersion, TypeError):
        return False
    return True


def _are_attention_types(value: Any) -> bool:
    """GPT-Neo's kinds of attention: lists of kinds, and how often each list is repeated."""
    try:
        return 0 <= sum(len(kinds) * count for kinds, count in value or []) <= MAX_LAYERS
    except (TypeError, ValueError):
        return False


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and int(key[:20]) < MAX_TOKENS


def _is_pooling(value: Any) -> bool:
    return all(isinstance(mode, str) for mode in (value if isinstance(value, list) else [value]))


def _reads_text(value: Any) -> bool:
    """ST calls the method of the backbone that the file names."""
    text = value.get("text") if isinstance(value, dict) else None
    return (
        isinstance(text, dict) and text.get("method") == "forward" and isinstance(text.get("method_output_name"), str)
    )


_MODULE = (_a(str, "type"), _a(str, "path"), _a(str, "name"))
# What stands under ``requires`` in ``config_sentence_transformers.json``, ST itself checks.
_SENTENCE_TRANSFORMERS = (
    _many(dict, optional(_a(str, "prompts"))),
    optional(_a(str, "default_prompt_name")),
    optional(_a(str, "similarity_fn_name")),
    _a(str, "model_type"),
    _a(dict, "__version__"),
)
_VERSIONS: Schema = [Setting("sentence_transformers", _is_version, "it must be a version, such as 6.2.0.")]
#: ``config.json`` of ST's ``Pooling``; before ST 6, each mode had a key of its own.
_POOLING: Schema = (
    optional(whole("embedding_dimension", 1, MAX_SIZE)),
    optional(whole("word_embedding_dimension", 1, MAX_SIZE)),
    Setting("pooling_mode", _is_pooling, "it must be a string, or a list of strings."),
)
_ROUTER: Schema = (_many(dict, _a(str, "types")),)
_SHARDS = (_a(dict, "metadata"), _many(dict, _a(str, "weight_map")))
#: A backbone's ``config.json``: what is read of it before transformers makes a configuration of it.
LANGUAGE_MODEL: Schema = (
    optional(_many(list, _a(str, "architectures"))),
    Setting(
        "attention_types", _are_attention_types, f"give lists of kinds with a number each, for {MAX_LAYERS} layers."
    ),
    optional(_a(dict, "text_config")),
    optional(_file("transformers_weights")),
    _many(list, _file("configuration_files")),
)
#: ``adapter_config.json`` of peft.
ADAPTER: Schema = (
    optional(_a(str, "base_model_name_or_path")),
    optional(whole("r", 0, MAX_SIZE)),
    _many(dict, whole("rank_pattern", 0, MAX_SIZE)),
    optional(_many(list, _many(list, whole("layer_replication", 0, MAX_LAYERS)))),
    Setting("megatron_config", lambda value: value is None, "it would name a module to import: use null."),
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
#: ``sentence_bert_config.json``, besides what a module's own class checks; the last three are former names of ST's.
TRANSFORMER: Schema = (
    _a(str, "module_output_name"),
    Setting("modality_config", _reads_text, "it must have text read by the method forward, with a method_output_name."),
    _a(str, "transformer_task"),
    *(_a(dict, f"{kind}_kwargs") for kind in ("processing", "model", "processor", "config")),
    *(_a(dict, f"{kind}_args") for kind in ("model", "tokenizer", "config")),
)


# Whole files


def read_modules(file: Path) -> list[dict[str, Any]]:
    """The modules of a model, by its ``modules.json``: each has a ``type``, a ``path`` and a ``name``.

    Raises:
        ValueError: If it is malformed, or a module lies outside the model.
    """
    entries = read_json(file)
    if not entries or not _many(list, _a(dict, "")).allowed(entries):
        raise ValueError(
            f"{file} is {shown(entries)}: it must be a list of modules, at least one. Save the model again."
        )
    for number, entry in enumerate(entries):
        check_values(entry, _MODULE, f"{file}, module {number},", needed=("type", "path", "name"))
        check_inside(entry["path"], file)
    found: list[dict[str, Any]] = entries
    return found


def shards_of(index: Path) -> dict[str, str]:
    """Which file has which weight, by an index; the files must lie beside it.

    Args:
        index: The file, such as ``model.safetensors.index.json``.

    Raises:
        ValueError: If the index is malformed, or names a file outside.
    """
    found = read_object(index)
    check_values(found, _SHARDS, index, needed=("weight_map",))
    shards: dict[str, str] = found["weight_map"]
    if not shards:
        raise ValueError(f"{index} names no file of weights. Fetch it again, or save the model again.")
    for name in sorted(set(shards.values())):
        check_inside(name, index, "file")
        check_link(index.parent / name, index.parent)
    return shards


def read_settings(directory: Path) -> dict[str, Any]:
    """A model's ``config_sentence_transformers.json``; nothing where there is none.

    Raises:
        ValueError: If it is malformed.
    """
    file = directory / "config_sentence_transformers.json"
    found = read_object(file) if file.is_file() else {}
    check_values(found, _SENTENCE_TRANSFORMERS, file)
    check_values(found.get("__version__", {}), _VERSIONS, file)
    prompts, default = found.get("prompts", {}), found.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ValueError(
            f"{file} has the default_prompt_name {shown(default)}, and the prompts {shown(sorted(prompts))}: name one "
            "of these, or remove it."
        )
    return found


def check_saved(directory: Path) -> list[dict[str, Any]]:
    """Hold the files that ST itself reads of a saved model to what they may say; nothing is loaded.

    What lies in the directory of a module of st_reba, that module checks when it is loaded.

    Args:
        directory: Of the model. One that is not there, or has no ``modules.json``, is left to be refused elsewhere.

    Returns:
        Its modules; none where there is no ``modules.json``.

    Raises:
        ValueError: If a file is malformed, or names a class that is gone.
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
            found = read_object(routes)
            check_values(found, _ROUTER, routes)
            check_classes(found.get("types", {}).values(), directory)
    return entries


# What is gone: earlier versions saved it, and 1.0 refuses it by its name


#: Classes of ``st_reba.modules``, the last of which 0.8 has.
REMOVED_CLASSES = (
    "EchoLayersModule",
    "HierarchicalTokenPrependingModule",
    "MoEEModule",
    "RerankModule",
)
#: Settings of the modules that stay, each with its default in 0.8.
REMOVED_SETTINGS: dict[str, Any] = {"chunk_length": None, "readout": "layer", "without_sink": False, "changes": []}

_REMOVED = "removed in 1.0: load it with st_reba 0.8."


def refuse_class(name: str, model: object, *args: Any, **kwargs: Any) -> NoReturn:
    """Take the place of ``load`` of a class that is gone.

    Raises:
        ValueError: Always, naming the model and the class.
    """
    raise ValueError(f"{model} is of {name}, {_REMOVED}")


def check_classes(references: Iterable[object], model: object) -> None:
    """Refuse a saved model that names a class that is gone.

    Args:
        references: The types of its modules, as its files name them.
        model: What the model is called.

    Raises:
        ValueError: If one of them is gone.
    """
    gone = {f"st_reba.modules.{name}": name for name in REMOVED_CLASSES}
    for reference in references:
        if isinstance(reference, str) and reference in gone:
            refuse_class(gone[reference], model)


def is_no_sink(settings: Mapping[str, Any]) -> bool:
    """Whether a saved CausalTransformer is what ``NoSinkModule`` is now: 0.8 saved that as its one change."""
    changes = settings.get("changes")
    change = changes[0] if isinstance(changes, list) and len(changes) == 1 else None
    names = {"key", "layers", "bidirectional_layers"}
    return isinstance(change, dict) and change.keys() == names and change["key"] == "no-sink"


def without_removed(
    settings: dict[str, Any], module: str, file: str, gone: Mapping[str, Any] = REMOVED_SETTINGS
) -> dict[str, Any]:
    """Return the settings of a saved module without those that are gone.

    Args:
        settings: As the file has them.
        module: The module's class.
        file: What the file is called.
        gone: The settings that are gone, each with its default in 0.8.

    Raises:
        ValueError: If one of those has another value than its default.
    """
    if module == "NoSinkModule" and is_no_sink(settings):
        (change,) = settings["changes"]
        settings = {name: value for name, value in {**settings, **change}.items() if name not in ("changes", "key")}
    for name, default in gone.items():
        if settings.get(name, default) != default:
            raise ValueError(f"{file} sets {name} to {settings[name]!r:.80}, a setting of {module}, {_REMOVED}")
    return {name: value for name, value in settings.items() if name not in gone}


# Models that are not there


#: What says that a model did not come from the Hub.
_HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled)


@contextmanager
def fetching(model: str) -> Iterator[None]:
    """Raise what libraries raise of a model that does not come from the Hub as one sentence.

    Raises:
        OSError: If it does not.
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
        why = "HF_HUB_OFFLINE is set, and it is not among what was fetched before"
        if not is_offline_mode():
            why = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        raise OSError(
            f"{missing}, and it cannot be had from the Hub ({why}). Check the name, or give a directory."
        ) from None
