"""How large a checkpoint is by its own header, held against its configuration before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from ..hub.saved_files import AdapterFile, checked, checked_index, read_object
from ..lm.sizes import check_size, in_a_line
from .saved_settings import adapted_model, adapter_file, hub_arguments, model_file, of_base

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
# A pickled checkpoint has no header: it holds no more numbers than half its bytes, and this many do no harm.
_PICKLED_LEAST = 2**24


def check_sizes(
    name_or_path: str, model_kwargs: Mapping[str, Any] | None, config_kwargs: Mapping[str, Any] | None
) -> None:
    """Refuse a model, or the model that an adapter is for, whose configuration does not go with its checkpoint.

    Shards that lie outside the model are refused, too. No weight is read; of a model on the Hub the files are fetched.

    Args:
        name_or_path: A directory or a Hub id; its configuration has been checked.
        model_kwargs: What is passed to ``AutoModel.from_pretrained``.
        config_kwargs: What is passed to ``AutoConfig.from_pretrained``.

    Raises:
        ValueError: If it describes a larger model, or none; or a file is malformed, or lies outside the model.
        OSError: If a shard is missing.
    """
    given, config_kwargs = model_kwargs or {}, dict(config_kwargs or {})
    where = hub_arguments(config_kwargs)
    adapter = adapter_file(name_or_path, where)
    if adapter is not None:
        _check_ranks(adapter)
    if (base := adapted_model(name_or_path, where)) is not None:
        name_or_path, where, config_kwargs = base, of_base(where), of_base(config_kwargs)
    if config_kwargs.get("trust_remote_code") or given.get("trust_remote_code"):
        # Its code may build anything.
        return
    file = "/".join(filter(None, (name_or_path, where.get("subfolder"), CONFIG_NAME)))
    config = _config(name_or_path, config_kwargs, file)
    files = _files(name_or_path, where, given, config)
    if files:
        check_size(config, sum(_numbers(path, config) for path in files), file)


def _config(name_or_path: str, config_kwargs: dict[str, Any], file: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(name_or_path, **config_kwargs)
    except (ImportError, MemoryError, OSError):
        raise
    # What its own class finds wrong with a configuration may be of any type.
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise
        raise ValueError(f"{file} is no configuration that transformers reads ({in_a_line(error)}).") from error


def _files(
    name_or_path: str, where: Mapping[str, Any], model_kwargs: Mapping[str, Any], config: PreTrainedConfig
) -> list[Path]:
    """The files of a checkpoint, those first that transformers looks for first; none where loading will find none."""
    names = [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME]
    if model_kwargs.get("use_safetensors") is False:
        names = names[2:]
    if variant := model_kwargs.get("variant"):
        names = [f"{stem}.{variant}.{suffix}" for stem, _, suffix in (name.rpartition(".") for name in names)]
    if asked := getattr(config, "transformers_weights", None):
        names = [asked]
    for name in names:
        found = model_file(name_or_path, name, where)
        if found is None:
            continue
        if found.suffix != ".json":
            return [found]
        shards = sorted(set(checked_index(found).weight_map.values()))
        return [_shard(name_or_path, shard, where, found) for shard in shards]
    return []


def _shard(name_or_path: str, shard: str, where: Mapping[str, Any], index: Path) -> Path:
    found = model_file(name_or_path, shard, where)
    if found is None:
        raise FileNotFoundError(f"{index} names {shard!r}, which is not there: get the whole checkpoint.")
    return found


def _numbers(path: Path, config: PreTrainedConfig) -> int:
    """How many numbers a file holds, at most."""
    size = path.stat().st_size
    if getattr(config, "quantization_config", None) is not None:
        return 8 * size
    if path.suffix != ".safetensors":
        return max(size // 2, _PICKLED_LEAST)
    return sum(prod(shape) for shape in _shapes(path))


def _shapes(path: Path) -> list[list[int]]:
    try:
        with safe_open(path, framework="pt") as weights:
            return [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ValueError(
            f"{path}: these weights are damaged or cut short ({error}). Fetch or save them again."
        ) from error


def _check_ranks(adapter: Path) -> None:
    """An adapter's ranks are dimensions of its weights."""
    settings = checked(AdapterFile, read_object(adapter), adapter)
    weights = adapter.with_name(_ADAPTER_WEIGHTS)
    if not weights.is_file():
        return
    rank = max([settings.r or 0, *settings.rank_pattern.values()])
    largest = max((size for shape in _shapes(weights) for size in shape), default=0)
    if rank > largest:
        raise ValueError(
            f"{adapter} asks for a rank of {rank}, and no weight of {weights.name} has a size beyond {largest}: they "
            "are of two adapters. Get both from one place."
        )
