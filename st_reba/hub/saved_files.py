"""What the files of a saved model may say: each is read here, held to a schema, and refused in a sentence.

Files of a model are somebody else's text. Neither torch nor the Hub's client is needed to look at them.
"""

from __future__ import annotations

import json
from pathlib import Path, PureWindowsPath
from typing import Annotated, Any, TypeVar

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, ValidationError
from pydantic_core import PydanticCustomError

from ..lm.sizes import MAX_LAYERS, MAX_SIZE, MAX_TOKENS

#: Configurations have some kilobytes; an index of shards may have some megabytes.
MAX_BYTES = 2**26
_LEVELS = 64

_Schema = TypeVar("_Schema", bound=BaseModel)


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


def checked(schema: type[_Schema], said: Any, file: object) -> _Schema:
    """What a file says, if it fits its schema.

    Raises:
        ValueError: If it does not, with the file, the first key that does not fit, its value, and what it should be.
    """
    try:
        return schema.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{quoted(part)}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        raise ValueError(f"{file} has no {key}, which a saved model has. Save the model again.")
    if first["type"] == "inside":
        raise ValueError(f"{file} has the path {shown(first['input'])}: {first['msg']}.")
    wanted = _WANTED.get(first["type"], first["msg"].replace("Input should be", "it must be"))
    said = f"sets {key} to" if key else "is"
    raise ValueError(f"{file} {said} {shown(first['input'])}: {wanted}. Correct the file, or save the model again.")


#: What pydantic says in Python's words.
_WANTED = {
    "dict_type": "it must be an object of names and values",
    "model_type": "it must be an object of names and values",
    "model_attributes_type": "it must be an object of names and values",
    "list_type": "it must be a list",
    "string_type": "it must be a string",
    "too_short": "it must have an entry",
}


def shown(value: Any) -> str:
    """A value as a sentence quotes it: of a file, so that it may be long, and hold anything."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def quoted(key: str) -> str:
    """A name that a file gives, as it is where that is a plain word, else in quotes: it may hold anything."""
    return key if key.isprintable() and len(key) <= 80 else shown(key)


# Paths


def is_inside(path: str) -> bool:
    """Whether a path that a file names stays below where it starts, by the rules of any system."""
    parts = PureWindowsPath(path)
    return not parts.anchor and ".." not in parts.parts and "\0" not in path


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


def checked_index(index: Path) -> ShardIndex:
    """What an index of shards says, if the files that it names, which lie beside it, lie there in truth.

    Args:
        index: The file, such as ``model.safetensors.index.json``.

    Raises:
        ValueError: If the index is malformed, or names a file outside.
    """
    found = checked(ShardIndex, read_json(index), index)
    for name in sorted(set(found.weight_map.values())):
        check_link(index.parent / name, index.parent)
    return found


def check_link(path: Path, root: Path) -> None:
    """Refuse a file of a model that is a link to something outside of it.

    Raises:
        ValueError: If it is one.
    """
    if leaves(path, root):
        raise ValueError(
            f"{path} is a link to {path.resolve()}, outside the model: put the file itself there, or remove the link."
        )


# Schemas


class _File(BaseModel):
    """A file whose named values are checked, and all others kept."""

    # Built when a file is read, not when the package is imported.
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=(), defer_build=True)


def _inside(path: str) -> str:
    if not is_inside(path):
        raise PydanticCustomError(
            "inside",
            'a module lies inside its model, so give a relative path without "..", or "" for the model\'s own '
            "directory",
        )
    return path


def _version(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion:
        raise PydanticCustomError("version", "it must be a version, such as 6.2.0") from None
    return text


def _size(value: Any) -> Any:
    """A number, or one for each layer."""
    for size in value if isinstance(value, list) else [value]:
        if size is not None and (type(size) is not int or not 1 <= size <= MAX_SIZE):
            raise PydanticCustomError("size", "it must be a whole number, from 1 to {most}", {"most": MAX_SIZE})
    return value


def _attention_types(value: Any) -> Any:
    """GPT-Neo's kinds of attention: lists of kinds, and how often each list is repeated."""
    try:
        layers = sum(len(kinds) * count for kinds, count in value or [])
    except (TypeError, ValueError):
        layers = -1
    if not 0 <= layers <= MAX_LAYERS:
        raise PydanticCustomError(
            "attention_types", "it must be lists of kinds with a number each, for at most {most} layers in all",
            {"most": MAX_LAYERS},
        )  # fmt: skip
    return value


def _token_id(text: str) -> str:
    if not (text.isascii() and text.isdigit() and int(text[:20]) < MAX_TOKENS):
        raise PydanticCustomError(
            "token_id", "its keys must be ids of tokens, from 0 to {most}", {"most": MAX_TOKENS - 1}
        )
    return text


def _modalities(value: dict[str, Any]) -> dict[str, Any]:
    """ST calls the method of the backbone that the file names."""
    text = value.get("text")
    if not isinstance(text, dict) or text.get("method") != "forward" or type(text.get("method_output_name")) is not str:
        raise PydanticCustomError(
            "modalities", "it must have text read by the method forward, with a method_output_name"
        )
    return value


def _file_name(path: str) -> str:
    if not path or not is_inside(path):
        raise PydanticCustomError("inside", 'a file lies inside its model, so give a relative path without ".."')
    return path


_FileName = Annotated[str, AfterValidator(_file_name)]
_Size = Annotated[Any, AfterValidator(_size)]
_Layer = Annotated[int, Field(ge=0, le=MAX_LAYERS)]


class ModuleEntry(_File):
    type: str
    path: Annotated[str, AfterValidator(_inside)]
    name: str


class ModulesFile(RootModel[Annotated[list[ModuleEntry], Field(min_length=1)]]):
    """``modules.json``."""

    model_config = ConfigDict(strict=True, defer_build=True)


class SentenceTransformersFile(_File):
    """``config_sentence_transformers.json``. What it ``requires`` ST itself reads with care."""

    prompts: dict[str, str | None] = {}
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    model_type: str = "SentenceTransformer"
    versions: dict[str, Any] = Field(default={}, alias="__version__")


class _Versions(_File):
    sentence_transformers: Annotated[str, AfterValidator(_version)] = "0"


class PoolingFile(_File):
    """``config.json`` of ST's ``Pooling``; before ST 6, each mode had a key of its own."""

    embedding_dimension: _Size = None
    word_embedding_dimension: _Size = None
    pooling_mode: str | list[str] | None = None


class ShardIndex(_File):
    """Which file has which weight."""

    metadata: dict[str, Any] = {}
    weight_map: Annotated[dict[str, _FileName], Field(min_length=1)]


class LanguageModelFile(_File):
    """A backbone's ``config.json``: what is read of it before transformers makes a configuration of it."""

    architectures: list[str] | None = None
    attention_types: Annotated[Any, AfterValidator(_attention_types)] = None
    text_config: dict[str, Any] | None = None
    transformers_weights: _FileName | None = None
    configuration_files: list[_FileName] = []


class AdapterFile(_File):
    """``adapter_config.json`` of peft."""

    base_model_name_or_path: str | None = None
    r: Annotated[int, Field(ge=0, le=MAX_SIZE)] | None = None
    rank_pattern: dict[str, Annotated[int, Field(ge=0, le=MAX_SIZE)]] = {}
    layer_replication: list[Annotated[list[_Layer], Field(min_length=2, max_length=2)]] | None = None
    # It would name a module to import.
    megatron_config: None = None


class TokenizerFile(_File):
    """``tokenizer_config.json``."""

    fast_tokenizer_files: list[_FileName] = []
    added_tokens_decoder: dict[Annotated[str, AfterValidator(_token_id)], dict[str, Any]] = {}


class TransformerFile(_File):
    """``sentence_bert_config.json``, besides what a module's own class checks."""

    module_output_name: str = "token_embeddings"
    modality_config: Annotated[dict[str, Any], AfterValidator(_modalities)] = {}
    transformer_task: str = "feature-extraction"
    processing_kwargs: dict[str, Any] = {}
    model_kwargs: dict[str, Any] = {}
    processor_kwargs: dict[str, Any] = {}
    config_kwargs: dict[str, Any] = {}
    # The names that ST gave them before, and still reads.
    model_args: dict[str, Any] = {}
    tokenizer_args: dict[str, Any] = {}
    config_args: dict[str, Any] = {}


# A whole model


def check_saved(directory: Path) -> list[ModuleEntry]:
    """Hold the files that ST itself reads of a saved model to what they may say; nothing is loaded.

    What lies in the directory of a module of st_reba, that module checks when it is loaded.

    Args:
        directory: Of the model. One that is not there, or has no ``modules.json``, is left to be refused elsewhere.

    Returns:
        Its modules; none where there is no ``modules.json``.

    Raises:
        ValueError: If a file is malformed.
    """
    modules = directory / "modules.json"
    if not modules.is_file():
        return []
    entries = checked(ModulesFile, read_json(modules), modules).root
    settings = directory / "config_sentence_transformers.json"
    if settings.is_file():
        found = checked(SentenceTransformersFile, read_object(settings), settings)
        checked(_Versions, found.versions, settings)
        if found.default_prompt_name is not None and found.default_prompt_name not in found.prompts:
            raise ValueError(
                f"{settings} has the default_prompt_name {shown(found.default_prompt_name)}, and the prompts "
                f"{shown(sorted(found.prompts))}: name one of these, or remove it."
            )
    for entry in entries:
        config = directory / entry.path / "config.json"
        if entry.type.endswith(".Pooling") and config.is_file():
            checked(PoolingFile, read_object(config), config)
    return entries
