"""Files of third-party checkpoints: configurations that ask for no code, and weights that are all there.

A model's files are written by somebody else. Among the settings that transformers takes from them are some that run
code, or read and write files elsewhere. A file may set what saving could have written, and nothing else. Arguments of
the caller are not checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, utils
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME

from ..lm.llama_cpp import MODEL_TYPE
from ..lm.sizes import MAX_EXPERTS, MAX_LABELS, MAX_LAYERS, MAX_SIZE
from . import saved_files
from .saved_files import check_values, quoted, read_object, shorten

# Arguments of transformers that say where a model's files are.
_WHERE = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
# Most of the parts that a config.json may ask for, by the ends of their names.
_MOST = {"layer": MAX_LAYERS, "layers": MAX_LAYERS, "experts": MAX_EXPERTS, "num_labels": MAX_LABELS}
# Ends of the names of those parts of a config.json that are configurations of their own.
_CONFIGS = ("config", "encoder", "decoder")
#: ``model_type`` of the configuration in the root of a saved model.
SAVED_MODEL = "st_reba"
# Those of them that belong to one model, and not also to the model that an adapter is for.
_OF_ONE_MODEL = ("revision", "subfolder")
#: Names of files of weights of a model and of an adapter, in the order of choice.
WEIGHTS = (utils.SAFE_WEIGHTS_NAME, utils.SAFE_WEIGHTS_INDEX_NAME, utils.WEIGHTS_NAME, utils.WEIGHTS_INDEX_NAME)
ADAPTER_WEIGHTS = (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)
# Largest rank that is always allowed: in adapters of some kinds, it is not the size of a weight.
_ALLOWED_RANK = 256
# A pickled checkpoint has no header: it holds at most half as many numbers as bytes, and these few do no harm.
_PICKLED_LEAST = 2**24


@dataclass(frozen=True)
class Files:
    """Files of a model.

    Attributes:
        name: A directory or a Hub id.
        arguments: Arguments of ``from_pretrained``, some of which say where the files are.
    """

    name: str
    arguments: Mapping[str, Any]

    @property
    def where(self) -> dict[str, Any]:
        """Arguments that say where the files are."""
        return {name: self.arguments[name] for name in _WHERE if self.arguments.get(name) is not None}

    def __str__(self) -> str:
        return "/".join(filter(None, (self.name, self.arguments.get("subfolder"))))

    def find(self, name: str, *, first: bool = False) -> Path | None:
        """Return the path of a file, fetched if need be; None if there is none, or it cannot be had.

        Args:
            name: Name of the file.
            first: Whether it is the first file that is asked for.

        Raises:
            OSError: If the Hub does not answer to the first, and nothing of the model is in the cache. Each further
                file would be asked for as often.
        """
        try:
            path = cached_file(self.name, name, **self.where)
        except OSError as error:
            if first and isinstance(error.__cause__, LocalEntryNotFoundError):
                cache = Path(self.where.get("cache_dir") or HF_HUB_CACHE)
                if not (cache / repo_folder_name(repo_id=self.name, repo_type="model")).is_dir():
                    raise
            return None
        return None if path is None else Path(path)

    def of_base(self, name: str, revision: str | None = None) -> Files:
        """Return the files of the model that an adapter is for: its own, or the first module's if it is a saved model.

        Args:
            name: A directory or a Hub id.
            revision: Its revision on the Hub.
        """
        arguments = {key: value for key, value in self.arguments.items() if key not in _OF_ONE_MODEL}
        base = Files(name, arguments if revision is None else {**arguments, "revision": revision})
        config, modules = base.find(utils.CONFIG_NAME), base.find("modules.json")
        if modules is None or (config is not None and not is_noted(config)):
            return base
        folder = saved_files.read_modules(modules)[0]["path"]
        if Path(name).is_dir():
            return Files(str(Path(name, folder)), base.arguments)
        return Files(name, {**base.arguments, "subfolder": folder})

    def with_arguments(self, arguments: Mapping[str, Any]) -> Files:
        """Return the same, with arguments that were given for another model."""
        kept = {key: self.arguments[key] for key in _OF_ONE_MODEL if key in self.arguments}
        return Files(self.name, {key: value for key, value in arguments.items() if key not in _OF_ONE_MODEL} | kept)


def is_noted(config: Path) -> bool:
    """Return whether a ``config.json`` is that of the root of a saved model, not of a language model."""
    return config.is_file() and read_object(config).get("model_type") == SAVED_MODEL


class Checkpoint(NamedTuple):
    """A checkpoint whose configuration has been checked.

    Attributes:
        config: Its configuration; None if it has code of its own, which may build anything.
        stored: Number of values that it holds, at most; None if that is not known.
        file: Name of the file of the configuration, for messages.
        base: Files of the model that an adapter is for, if they are elsewhere.
    """

    config: PreTrainedConfig | None
    stored: int | None
    file: str
    base: Files | None


def check_model(name_or_path: str, model_kwargs: Mapping[str, Any], config_kwargs: Mapping[str, Any]) -> Files | None:
    """Raise if a model's configuration asks for code, or for more than a model can be. No weight is read.

    If the model is an adapter, the model that it is for is checked too.

    Args:
        name_or_path: A directory or a Hub id.
        model_kwargs: Arguments of ``AutoModel.from_pretrained`` that the caller or a checked file gives.
        config_kwargs: Arguments of ``AutoConfig.from_pretrained``, such as ``subfolder``.

    Returns:
        Files of the model that an adapter is for, if they are elsewhere.

    Raises:
        ValueError: If it does.
    """
    files = Files(name_or_path, config_kwargs)
    is_chosen = "attn_implementation" in {**model_kwargs, **config_kwargs}
    _check_config(files, is_chosen)
    adapter = files.find(ADAPTER_CONFIG_NAME)
    if adapter is None:
        return None
    weights = adapter.with_name(ADAPTER_SAFE_WEIGHTS_NAME)
    settings = read_object(adapter, saved_files.AdapterConfig)
    # An adapter's ranks are dimensions of its weights.
    ranks = (settings.get("rank_pattern") or {}).values()
    rank = max([settings.get("r") or 0, *(rank for rank in ranks if isinstance(rank, int))])
    if weights.is_file() and rank > max([_ALLOWED_RANK, *(size for shape in shapes_of(weights) for size in shape)]):
        problem = f"{adapter} asks for a rank of {rank}, and no weight of {weights.name} is as large:"
        raise ValueError(f"{problem} they are of two adapters. Get both from one place.")
    base = files.of_base(str(settings.get("base_model_name_or_path")), settings.get("revision"))
    with saved_files.fetching(base.name):
        _check_config(base, is_chosen)
    return None if adapter.with_name(utils.CONFIG_NAME).is_file() else base


def _check_config(files: Files, attention_is_chosen: bool) -> None:
    # Where there is none, loading fails with a message.
    if path := files.find(utils.CONFIG_NAME, first=True):
        file, config = f"{files}/{utils.CONFIG_NAME}", read_object(path)
        _check_part(config, file, attention_is_chosen)
        if "configuration_files" in config:
            # It may choose another file by transformers' version.
            _check_part(PreTrainedConfig.get_config_dict(files.name, **files.where)[0], file, attention_is_chosen)


def _check_part(config: dict[str, Any], file: str, attention_is_chosen: bool, path: str = "") -> None:
    """Check a configuration, or an object at ``path`` within one, and all objects within that."""
    # An object that is no configuration of its own has other keys.
    if not path or path.endswith(_CONFIGS):
        check_values(config, saved_files.LanguageModelConfig, f"{file}, {path}," if path else file)
    for key, value in config.items():
        place = f"{path}.{quoted(key)}" if path else quoted(key)
        is_attention = key in ("attn_implementation", "_attn_implementation") and not attention_is_chosen
        if is_attention and not saved_files.is_plain_attention(value):
            raise ValueError(
                f"{file} sets {place} to {shorten(value)}: that may be a kernel, code from the Hub. Remove it from "
                'the file, or choose yourself: model_kwargs={"attn_implementation": "sdpa"}.'
            )
        if key in ("dtype", "torch_dtype") and not isinstance(value, dict | None) and not saved_files.is_dtype(value):
            problem = f"{file} sets {place} to {shorten(value)}:"
            raise ValueError(f"{problem} give a type of PyTorch's numbers, such as float32.")
        for name, most in _MOST.items():
            if key.endswith(name) and type(value) is int and value > most:
                raise ValueError(f"{file} asks for {value} ({place}): st_reba loads models with at most {most}.")
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                _check_part(inner, file, attention_is_chosen, place)


def read_config(files: Files) -> PreTrainedConfig:
    """Read the configuration of a model that :func:`check_model` has checked.

    Raises:
        ValueError: If transformers cannot read it, or a size in it is out of range.
    """
    file = f"{files}/{utils.CONFIG_NAME}"
    with saved_files.readable(f"{file} is no configuration that transformers reads"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(files.name, **files.arguments)
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
        size = getattr(config.get_text_config(decoder=True), name, None)
        # An older huggingface_hub takes true for a number.
        if isinstance(size, bool) or (isinstance(size, int) and not 1 <= size <= MAX_SIZE):
            raise ValueError(f"{file} sets {name} to {size}: it must be a whole number, from 1 to {MAX_SIZE}.")
    return config


def check_checkpoint(
    name_or_path: str, model_kwargs: Mapping[str, Any], config_kwargs: Mapping[str, Any]
) -> Checkpoint:
    """Check the configuration and the files of a checkpoint. Of a model on the Hub, the files are fetched.

    Args:
        name_or_path: A directory or a Hub id.
        model_kwargs: Arguments of ``AutoModel.from_pretrained``.
        config_kwargs: Arguments of ``AutoConfig.from_pretrained``.

    Raises:
        ValueError: As :func:`check_model`, or if a file is malformed, or outside the model.
        OSError: If a shard is missing, or a directory has no weights at all.
    """
    base = check_model(name_or_path, model_kwargs, config_kwargs)
    files = base or Files(name_or_path, config_kwargs)
    file = f"{files}/{utils.CONFIG_NAME}"
    if files.arguments.get("trust_remote_code") or model_kwargs.get("trust_remote_code"):
        return Checkpoint(None, None, file, base)
    config = read_config(files)
    weights = _weights(files, model_kwargs, config)
    return Checkpoint(config, sum(_count(path, config) for path in weights) if weights else None, file, base)


def _weights(files: Files, model_kwargs: Mapping[str, Any], config: PreTrainedConfig) -> list[Path]:
    """Return the files of a checkpoint, as transformers chooses them; none if the Hub has none."""
    names = [*(WEIGHTS[2:] if model_kwargs.get("use_safetensors") is False else WEIGHTS)]
    if variant := model_kwargs.get("variant"):
        names = [f"{stem}.{variant}.{suffix}" for stem, _, suffix in (name.rpartition(".") for name in names)]
    if asked := getattr(config, "transformers_weights", None):
        names = [asked]
    path = next(filter(None, map(files.find, names)), None)
    if path is None:
        directory = Path(str(files))
        if not directory.is_dir() or config.model_type == MODEL_TYPE:
            return []
        gguf_file = next(directory.glob("*.gguf"), None)
        instead = "a directory with the whole model" if gguf_file is None else f"the GGUF file in it: {gguf_file}"
        raise FileNotFoundError(
            f"{files} has a {utils.CONFIG_NAME} and no weights: none of {', '.join(names)} is there. Give {instead}."
        )
    if path.suffix != ".json":
        return [path]
    shards = []
    for name in sorted(set(saved_files.shards_of(path).values())):
        shard = files.find(name)
        if shard is None:
            raise FileNotFoundError(f"{path} names {name!r}, which is not there: get the whole checkpoint.")
        shards.append(shard)
    return shards


def _count(path: Path, config: PreTrainedConfig) -> int:
    """Return the number of values that a file holds, at most."""
    size = path.stat().st_size
    if getattr(config, "quantization_config", None) is not None:
        return 8 * size
    if path.suffix != ".safetensors":
        return max(size // 2, _PICKLED_LEAST)
    return sum(map(prod, shapes_of(path)))


def shapes_of(path: Path) -> list[list[int]]:
    """Return the shapes of the weights in a file.

    Raises:
        ValueError: If its header is damaged.
    """
    try:
        with safe_open(path, framework="pt") as weights:
            return [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        problem = f"{path}: these weights are damaged or cut short ({error})."
        raise ValueError(f"{problem} Fetch or save them again.") from error


def missing_weights(report: Mapping[str, Any], part: str = "") -> dict[str, str]:
    """Return the names of the weights that a checkpoint lacks, each with what it has instead, if anything.

    Args:
        report: Result of ``from_pretrained`` for ``output_loading_info=True``.
        part: Path of the part of the model whose weights are returned, by their names in it.
    """
    missing = dict.fromkeys(report["missing_keys"], "")
    for name, there, wanted in report["mismatched_keys"]:
        missing[name] = f"{tuple(there)} there, {tuple(wanted)} by its configuration"
    begin = f"{part}." if part else ""
    return {name.removeprefix(begin): instead for name, instead in missing.items() if name.startswith(begin)}
