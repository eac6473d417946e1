"""Validation of the files of a saved model, which others may have written.

Errors of downloads are also raised here, with one message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Annotated, Any, Literal, NoReturn

import torch
from huggingface_hub import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, ValidationError

from ..lm.sizes import MAX_LAYERS, MAX_SIZE, MAX_TOKENS, in_a_line

#: Limit of a JSON file: configurations have some kilobytes, and an index of shards may have some megabytes.
MAX_BYTES = 2**26
_LEVELS = 64
#: Arguments of ``load`` that say where the files of a model on the Hub are.
ON_THE_HUB = ("token", "cache_folder", "revision", "local_files_only")
# Attention in plain PyTorch, or in an installed package. Any other name may be that of a kernel on the Hub, which is
# code. The last is this package's.
_PLAIN_ATTENTION = re.compile("eager|sdpa|flex_attention|flash_attention_[234]|st_reba")
# Settings that earlier versions of sentence-transformers wrote.
_FORMER_SETTINGS = ("do_lower_case", "max_seq_length", "unpad_inputs")


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

    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, and at most {MAX_BYTES:,} are allowed. Download it again.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=constant)
        if _is_deep(content):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{path} is nested more than {_LEVELS} levels deep. Download it again.") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}). Download it again, or save the model again.") from None
    return content


def _is_deep(value: Any) -> bool:
    """Return whether a value is nested so deeply that recursion over it might fail."""
    level = [value]
    for _ in range(_LEVELS):
        inner = [value for value in level if isinstance(value, (dict, list))]
        level = [part for value in inner for part in (value.values() if isinstance(value, dict) else value)]
    return bool(level)


def read_object(path: Path, schema: type[BaseModel] | None = None) -> dict[str, Any]:
    """Read a JSON object from a file of a model.

    Args:
        path: Path of the file.
        schema: Values to check: see :func:`check_values`.

    Raises:
        ValueError: If the file contains anything else, or for the reasons of :func:`read_json`.
        OSError: If the file cannot be read.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is {shorten(content)}, and not an object of names and values. Save the model again.")
    if schema is not None:
        check_values(content, schema, path)
    return content


def check_values(values: object, schema: type[BaseModel], file: object) -> None:
    """Check the values in a file.

    Args:
        values: Content of the file. Values of other names than the schema's are ignored.
        schema: Model of the values.
        file: Name of the file in messages.

    Raises:
        ValueError: If a value is not allowed, or a required one is missing.
    """
    try:
        schema.model_validate(values)
    except ValidationError as invalid:
        error = invalid.errors()[0]
        place = ".".join(quoted(str(key)) for key in error["loc"])
        if error["type"] == "missing":
            raise ValueError(f"{file} has no {place}. Save the model again.") from None
        reason, remedy = error["msg"].removeprefix("Value error, ").rstrip("."), "Correct the file"
        if error["type"] == "extra_forbidden":
            reason, remedy = "a file may not", "Remove it from the file, and pass it yourself if you trust the model"
        problem = f"{file} {f'sets {place} to' if place else 'is'} {shorten(error['input'])}"
        raise ValueError(f"{problem}: {reason}. {remedy}, or save the model again.") from None


def shorten(value: Any) -> str:
    """Return a value for a message, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def quoted(key: str) -> str:
    """Return a name for a message, quoted and shortened if it is long or cannot be printed."""
    return key if key.isprintable() and len(key) <= 80 else shorten(key)


# Paths


def check_inside(path: str) -> str:
    """Return a path inside a model, by the rules of any operating system.

    Raises:
        ValueError: If the path leads out of the model.
    """
    parts = PureWindowsPath(path)
    if parts.anchor or ".." in parts.parts or "\0" in path:
        raise ValueError(f'{shorten(path)} leads out of its model: give a relative path without ".."')
    return path


def check_link(path: Path, root: Path) -> None:
    """Check that a file of a model is not a link to a file outside.

    In the Hub's cache, a model's files are links to blobs, ``snapshots/<commit>/file -> ../../blobs/<hash>``.

    Raises:
        ValueError: If the file is such a link.
    """
    root, target = root.resolve(), path.resolve()
    snapshot = next((folder for folder in (root, *root.parents) if folder.parent.name == "snapshots"), None)
    is_blob = snapshot is not None and target.parent == snapshot.parent.parent / "blobs"
    if not target.is_relative_to(root) and not is_blob:
        problem = f"{path} is a link to {target}, outside the model:"
        raise ValueError(f"{problem} put the file itself there, or remove the link.")


# Schemas: values that are checked, each with the type of its name in the file


def is_plain_attention(value: Any) -> bool:
    """Return whether a value names attention implementations that are not downloaded."""
    names = value.values() if isinstance(value, dict) else [value]
    return all(name is None or (isinstance(name, str) and _PLAIN_ATTENTION.fullmatch(name)) for name in names)


def is_dtype(value: Any) -> bool:
    """Return whether a value names a dtype of PyTorch, or ``"auto"``."""
    return value == "auto" or (isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype))


def _are_attention_types(value: Any) -> bool:
    """Return whether a value lists GPT-Neo's kinds of attention, each list with its number of repetitions."""
    try:
        return 0 <= sum(len(kinds) * count for kinds, count in value or []) <= MAX_LAYERS
    except (TypeError, ValueError):
        return False


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and int(key[:20]) < MAX_TOKENS


def _only(is_allowed: Callable[[Any], bool], advice: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if not is_allowed(value):
            raise ValueError(advice)
        return value

    return AfterValidator(check)


class _Values(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())


_Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
_Rank = Annotated[int, Field(ge=0, le=MAX_SIZE)]
_Layer = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
_Inside = Annotated[str, AfterValidator(check_inside)]
_File = Annotated[str, Field(min_length=1), AfterValidator(check_inside)]
_Version = Annotated[str, AfterValidator(Version)]
_AttentionTypes = Annotated[Any, _only(_are_attention_types, f"give numbers of layers, at most {MAX_LAYERS} in all")]
_TokenId = Annotated[str, _only(_is_token_id, f"ids of tokens are from 0 to {MAX_TOKENS - 1}")]
_Attention = Annotated[Any, _only(is_plain_attention, "it may be a kernel, code from the Hub")]
_Dtype = Annotated[Any, _only(is_dtype, "give a type of PyTorch's numbers, such as float32")]


class _Module(_Values):
    type: str
    path: _Inside
    name: str


class _Modules(RootModel[Annotated[list[_Module], Field(min_length=1)]]):
    model_config = ConfigDict(strict=True)


class _Versions(_Values):
    sentence_transformers: _Version = "0"


class _SentenceTransformers(_Values):
    """``config_sentence_transformers.json`` without ``requirements``, which ST checks itself."""

    prompts: dict[str, str | None] = {}
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    model_type: str = ""
    versions: Annotated[_Versions, Field(alias="__version__")] = _Versions()


class _Pooling(_Values):
    """``config.json`` of ST's ``Pooling``. Before ST 6, each mode had its own key."""

    embedding_dimension: _Size | None = None
    word_embedding_dimension: _Size | None = None
    pooling_mode: str | list[str] = ""


class _Router(_Values):
    types: dict[str, str] = {}


class _Shards(_Values):
    metadata: dict[str, Any] = {}
    weight_map: Annotated[dict[str, _File], Field(min_length=1)]


class LanguageModelConfig(_Values):
    """Values of a backbone's ``config.json`` that are read before transformers loads it."""

    architectures: list[str] | None = None
    attention_types: _AttentionTypes = None
    text_config: dict[str, Any] | None = None
    transformers_weights: _File | None = None
    configuration_files: list[_File] = []


class AdapterConfig(_Values):
    """``adapter_config.json`` of peft. Its ``megatron_config`` names a module to import."""

    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: _Rank | None = None
    #: Of AdaLoRA, whether each rank of a layer is left.
    rank_pattern: dict[str, _Rank | list[bool]] | None = None
    layer_replication: list[list[_Layer]] | None = None
    megatron_config: None = None


class Tokenizer(_Values):
    """``tokenizer_config.json``."""

    fast_tokenizer_files: list[_File] = []
    added_tokens_decoder: dict[_TokenId, dict[str, Any]] = {}


class _Text(_Values):
    """Reading of text by ``forward``, as ST calls any method of the backbone that a file names."""

    method: Literal["forward"]
    method_output_name: str


class _Modalities(_Values):
    text: _Text


class _Arguments(_Values):
    """Arguments of transformers that a file may give."""

    model_config = ConfigDict(extra="forbid")


class _ModelArguments(_Arguments):
    attn_implementation: _Attention = None
    dtype: _Dtype = "auto"
    torch_dtype: _Dtype = "auto"


class _ProcessorArguments(_Arguments):
    model_max_length: int = 0


class _TransformerSettings(_Values):
    """Values of ``sentence_bert_config.json`` that are not settings of a module, with their former names in ST."""

    module_output_name: str = ""
    modality_config: Annotated[_Modalities, Field(default_factory=dict)]
    transformer_task: str = ""
    processing_kwargs: dict[str, Any] = {}
    model_kwargs: _ModelArguments = _ModelArguments()
    model_args: _ModelArguments = _ModelArguments()
    processor_kwargs: _ProcessorArguments = _ProcessorArguments()
    tokenizer_args: _ProcessorArguments = _ProcessorArguments()
    config_kwargs: _Arguments = _Arguments()
    config_args: _Arguments = _Arguments()


# Whole files


def read_modules(file: Path) -> list[dict[str, Any]]:
    """Read a ``modules.json``, whose entries have a ``type``, a ``path`` and a ``name``.

    Raises:
        ValueError: If the file is malformed, or a module lies outside the model.
    """
    entries: list[dict[str, Any]] = read_json(file)
    check_values(entries, _Modules, file)
    return entries


def shards_of(index: Path) -> dict[str, str]:
    """Return the files of weights by the weights' names, which an index in the same folder lists.

    Args:
        index: Index file, such as ``model.safetensors.index.json``.

    Raises:
        ValueError: If the index is malformed, or names a file outside its folder.
    """
    shards: dict[str, str] = read_object(index, _Shards)["weight_map"]
    for name in sorted(set(shards.values())):
        check_link(index.parent / name, index.parent)
    return shards


def read_settings(directory: Path) -> dict[str, Any]:
    """Read the ``config_sentence_transformers.json`` of a model, or return an empty dictionary if there is none.

    Raises:
        ValueError: If the file is malformed.
    """
    file = directory / "config_sentence_transformers.json"
    settings = read_object(file, _SentenceTransformers) if file.is_file() else {}
    prompts, default = settings.get("prompts", {}), settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        problem = f"{file} has the default_prompt_name {shorten(default)}, and the prompts {shorten(sorted(prompts))}:"
        raise ValueError(f"{problem} give one of these, or remove it.")
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
    classes = [entry["type"] for entry in entries]
    read_settings(directory)
    for entry in entries:
        config, routes = (directory / entry["path"] / name for name in ("config.json", "router_config.json"))
        if entry["type"].endswith(".Pooling") and config.is_file():
            read_object(config, _Pooling)
        if entry["type"].endswith(".Router") and routes.is_file():
            classes += read_object(routes, _Router).get("types", {}).values()
    for name in REMOVED_CLASSES:
        if f"st_reba.modules.{name}" in classes:
            refuse_class(name, directory)
    return entries


# Classes and settings removed in 1.0, which saved models of 0.8 may have


#: Removed classes of ``st_reba.modules``.
REMOVED_CLASSES = ("EchoLayersModule", "HierarchicalTokenPrependingModule", "MoEEModule", "RerankModule")
#: Removed settings of modules, with their defaults in 0.8.
REMOVED_SETTINGS: dict[str, Any] = {"chunk_length": None, "readout": "layer", "without_sink": False, "changes": []}

_REMOVED = "removed in 1.0: load it with st_reba 0.8."


def refuse_class(name: str, model: object, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error in place of loading a removed class.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{model} is of {name}, {_REMOVED}")


def is_no_sink(settings: Mapping[str, Any]) -> bool:
    """Return whether a saved CausalTransformer is now a ``NoSinkModule``, which 0.8 saved as its only change."""
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


# Settings of modules


def check_names(settings: Mapping[str, Any], known: Collection[str], module: str, file: str) -> None:
    """Check that a saved module has no other settings than its class.

    Args:
        settings: The settings in its file.
        known: Names of the class's settings.
        module: Name of the class.
        file: Name of the file.

    Raises:
        ValueError: If it has.
    """
    for name in settings:
        if name not in known:
            raise ValueError(
                f"{file} sets {quoted(name)}, which is no setting of {module}: a saved one has "
                f"{', '.join(sorted(known)) or 'none'}. Remove it from the file, or save the model again."
            )


def check_transformer_settings(settings: Mapping[str, Any], known: Collection[str], module: str, file: str) -> None:
    """Check the settings of a saved module with a language model, as :func:`check_names`.

    Raises:
        ValueError: If one is not known, gives an argument of transformers that a file may not give, or lets another
            method than ``forward`` read text.
    """
    check_names(settings, {*known, *_FORMER_SETTINGS, *_TransformerSettings.model_fields}, module, file)
    check_values(settings, _TransformerSettings, file)


# Errors of libraries


@contextmanager
def readable(problem: str, advice: str = "", *, unchanged: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise any error of a library that reads a file of others as a ValueError with one message.

    Errors about packages, memory and the system, and about code that is not trusted, stay as they are.

    Args:
        problem: Beginning of the message.
        advice: End of the message.
        unchanged: Further errors that stay as they are.

    Raises:
        ValueError: If the file cannot be read.
    """
    try:
        yield
    except (ImportError, MemoryError, OSError):
        raise
    except Exception as error:
        if isinstance(error, unchanged) or "trust_remote_code" in str(error):
            raise
        raise ValueError(f"{problem} ({in_a_line(error)}). {advice}".rstrip()) from error


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
        if is_offline_mode():
            reason = "HF_HUB_OFFLINE is set, and the model is not in the cache"
        elif isinstance(cause, LocalEntryNotFoundError):
            reason = "it does not answer, and the model is not in the cache"
        else:
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        problem = f"{missing}, and it cannot be downloaded from the Hub ({reason})."
        raise OSError(f"{problem} Check the name, or give a directory.") from None
