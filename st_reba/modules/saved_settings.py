"""What the files of a model may ask for on loading: what saving could have written, and nothing else.

A model's files are somebody else's text. ST hands what they say about loading to transformers as arguments, and among
transformers' arguments are some that run code, read and write files elsewhere, or take the protection off pickled
weights. What a caller passes is the caller's own business and never looked at here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.modules import Module
from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from ..hub.saved_files import (
    AdapterFile,
    LanguageModelFile,
    TokenizerFile,
    TransformerFile,
    check_named_files,
    checked,
    quoted,
    read_object,
    shown,
)
from ..lm.limits import MAX_EXPERTS, MAX_LABELS, MAX_LAYERS

#: Attention in plain PyTorch, or in a package that the user has installed. Any other name may be that of a kernel on
#: the Hub, which is code. The last is what our own modules set.
PLAIN_ATTENTION = (
    None,
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "st_reba",
)

_HUB_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation")
# By the end of their names, the numbers in a config.json that say how many parts are built, and the most there may be.
_MOST = {"layer": MAX_LAYERS, "layers": MAX_LAYERS, "experts": MAX_EXPERTS, "num_labels": MAX_LABELS}
# The parts of a config.json that are configurations of their own, by the ends of their names.
_PARTS = ("_config", "encoder", "decoder")


def _is_plain(value: Any) -> bool:
    return all(name in PLAIN_ATTENTION for name in (value.values() if isinstance(value, dict) else [value]))


def _is_dtype(value: Any) -> bool:
    return value == "auto" or (isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype))


def _is_length(value: Any) -> bool:
    return type(value) is int


#: The arguments of transformers that a saved file may give.
_ARGUMENTS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "model_kwargs": {"attn_implementation": _is_plain, "dtype": _is_dtype, "torch_dtype": _is_dtype},
    "processor_kwargs": {"model_max_length": _is_length},
    "config_kwargs": {},
}
# The names that ST gave them before, and still reads.
_FORMER_NAMES = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}
# What earlier versions of ST wrote beside the settings of today.
_FORMER_SETTINGS = ("do_lower_case", "max_seq_length")


def check_is_object(module: type[Module], name_or_path: str, where: Mapping[str, Any]) -> None:
    """Refuse the file of a module's settings where it is no object of names and values.

    Args:
        module: Its class.
        name_or_path: A directory or a Hub id.
        where: As for ``load_file_path``; ``config_filename`` is the name of the file, if not the usual one.

    Raises:
        ValueError: If it is none.
    """
    place = dict(where)
    file = place.pop("config_filename", None) or module.config_file_name
    found = module.load_file_path(name_or_path, file, **place)
    if found is not None:
        read_object(Path(found))


def check_settings(settings: Mapping[str, Any], known: Collection[str], module: str, file: str) -> None:
    """Refuse settings that no module of this class could have saved.

    Args:
        settings: Of a module, as its file has them.
        known: The names of its settings.
        module: Its class.
        file: What the file is called, with its directory.

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
    """As :func:`check_settings`, for a module with a backbone, whose file may name transformers' arguments, too.

    Raises:
        ValueError: If it gives an argument that is not allowed, or lets another method than ``forward`` read text.
    """
    kinds = {name: _FORMER_NAMES.get(name, name) for name in (*_ARGUMENTS, *_FORMER_NAMES)}
    check_settings(settings, {*known, *_FORMER_SETTINGS, *kinds}, module, file)
    for name, kind in kinds.items():
        arguments = settings.get(name, {})
        if not isinstance(arguments, dict):
            raise ValueError(f"{file} sets {name} to {arguments!r}: it is an object of names and values. Remove it.")
        for argument, value in arguments.items():
            allowed = _ARGUMENTS[kind]
            if argument not in allowed or not allowed[argument](value):
                raise ValueError(
                    f"{file} sets {quoted(argument)} in {name} to {shown(value)}, which a file may not: there it may "
                    f"set {_listed(allowed)}. Remove it from the file; if you trust the model, pass {kind}="
                    f"{{{argument!r}: ...}} yourself."
                )
    if "modality_config" in settings:
        _check_reading(settings["modality_config"], file)
    checked(TransformerFile, dict(settings), file)


def _check_reading(modalities: Any, file: str) -> None:
    """ST calls the method of the backbone that the file names."""
    text = modalities.get("text")
    method = text.get("method") if isinstance(text, dict) else text
    if method != "forward":
        raise ValueError(f"{file} has text read by {method!r}: a language model reads it with forward. Remove it.")
    if not isinstance(text, dict) or not isinstance(text.get("method_output_name"), str):
        raise ValueError(
            f"{file} has the modality_config {shown(modalities)}: text has a method and a method_output_name."
        )


def check_model(
    name_or_path: str, model_kwargs: Mapping[str, Any] | None, config_kwargs: Mapping[str, Any] | None
) -> None:
    """Refuse a model whose configuration asks for code, or for more than a model can be. No weight is opened.

    If the model is an adapter, the model that it is for is held to the same.

    Args:
        name_or_path: A directory or a Hub id.
        model_kwargs: What the caller, or a checked file, passes to ``AutoModel.from_pretrained``.
        config_kwargs: The same for ``AutoConfig.from_pretrained``: ``subfolder``, ``revision`` and so on are used.

    Raises:
        ValueError: If it does.
    """
    where = hub_arguments(config_kwargs)
    chosen = any("attn_implementation" in (given or {}) for given in (model_kwargs, config_kwargs))
    _check_config(name_or_path, where, chosen)
    adapter = adapter_file(name_or_path, where)
    if adapter is not None:
        settings = checked(AdapterFile, read_object(adapter), adapter)
        _check_adapter(settings, str(adapter))
        _check_config(str(settings.base_model_name_or_path), of_base(where), chosen)


def hub_arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of transformers' arguments that say where the files are."""
    return {name: value for name, value in (given or {}).items() if name in _HUB_ARGUMENTS and value is not None}


def of_base(where: Mapping[str, Any]) -> dict[str, Any]:
    """The same for the model that an adapter is for, which has a revision and a directory of its own."""
    return {name: value for name, value in where.items() if name not in ("revision", "subfolder")}


def adapted_model(name_or_path: str, where: Mapping[str, Any]) -> str | None:
    """The name of the model that an adapter is for, if it lies apart."""
    found = adapter_file(name_or_path, where)
    if found is None or found.with_name("config.json").is_file():
        return None
    return str(read_object(found).get("base_model_name_or_path"))


def adapter_file(name_or_path: str, where: Mapping[str, Any]) -> Path | None:
    """The configuration of an adapter, if that is what the model is."""
    found = find_adapter_config_file(name_or_path, **where)
    return None if found is None else Path(found)


def _check_config(name_or_path: str, where: Mapping[str, Any], attention_is_chosen: bool) -> None:
    found = model_file(name_or_path, CONFIG_NAME, where)
    # Where there is none, loading fails with a message.
    if found is None:
        return
    file = "/".join(filter(None, (name_or_path, where.get("subfolder"), CONFIG_NAME)))
    _check_parts(read_object(found), file)
    # It may choose another file by transformers' version.
    config, _ = PreTrainedConfig.get_config_dict(name_or_path, **where)
    _check_parts(config, file)
    for path, key, value in _entries(config):
        if key in _ATTENTION_KEYS and not attention_is_chosen and not _is_plain(value):
            raise ValueError(
                f"{file} sets {path} to {shown(value)}: that may be a kernel, code from the Hub. Remove it from "
                'the file, or choose yourself: model_kwargs={"attn_implementation": "sdpa"}.'
            )
        if (
            key in ("dtype", "torch_dtype")
            and value is not None
            and not isinstance(value, dict)
            and not _is_dtype(value)
        ):
            raise ValueError(
                f"{file} sets {path} to {shown(value)}: give a type of PyTorch's numbers, such as float32."
            )
        most = next((most for name, most in _MOST.items() if key.endswith(name)), None)
        if most is not None and type(value) is int and value > most:
            raise ValueError(f"{file} asks for {value} ({path}): st_reba loads models with at most {most}.")


def model_file(name_or_path: str, name: str, where: Mapping[str, Any]) -> Path | None:
    """Where a file of a model lies on this machine, fetched if need be; None if there is none, or nothing is had."""
    try:
        found = cached_file(name_or_path, name, **where)
    except OSError:
        return None
    return None if found is None else Path(found)


def _check_parts(config: dict[str, Any], file: str) -> None:
    """A configuration, and those that it is made of, as far as they have names that all configurations share."""
    said = checked(LanguageModelFile, config, file)
    check_named_files(said.configuration_files, file)
    if said.transformers_weights is not None:
        check_named_files([said.transformers_weights], file)
    for key, part in config.items():
        if isinstance(part, dict) and key.endswith(_PARTS):
            _check_parts(part, f"{file}, {quoted(key)},")


def check_tokenizer(name_or_path: str, processor_kwargs: Mapping[str, Any] | None) -> None:
    """Refuse a ``tokenizer_config.json`` that is malformed, or has files read from outside the model.

    Args:
        name_or_path: A directory or a Hub id.
        processor_kwargs: What the caller, or a checked file, passes to the tokenizer's ``from_pretrained``.

    Raises:
        ValueError: If it is, or does.
    """
    found = model_file(name_or_path, TOKENIZER_CONFIG_FILE, hub_arguments(processor_kwargs))
    if found is None:
        return
    said = checked(TokenizerFile, read_object(found), found)
    check_named_files(said.fast_tokenizer_files, found)


def _check_adapter(settings: AdapterFile, file: str) -> None:
    if settings.megatron_config:
        raise ValueError(f"{file} sets megatron_config, which imports a module by its name. Remove it from the file.")
    for first, end in settings.layer_replication or []:
        if end - first > MAX_LAYERS:
            raise ValueError(
                f"{file} asks for {end - first} layers (layer_replication): st_reba loads models with at most "
                f"{MAX_LAYERS}."
            )


def _entries(config: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """All that a configuration says, its inner ones included: where, under which key, and what."""
    for key, value in config.items():
        yield f"{path}{quoted(key)}", key, value
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                yield from _entries(inner, f"{path}{quoted(key)}.")


def _listed(allowed: Mapping[str, Any]) -> str:
    names = ", ".join(sorted(allowed))
    return f"{names}, within bounds" if names else "nothing"
