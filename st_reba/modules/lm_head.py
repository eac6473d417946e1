"""The language model's head, read block by block, without the language model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module, Transformer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.import_utils import check_torch_load_is_safe

from ..hub.saved_files import checked_index
from ..lm import gguf
from .saved_settings import check_model
from .saving import backbone_of

#: Rows of the head (tokens of the vocabulary) in a block.
BLOCK = 4096

# What the head was called in checkpoints that transformers renames on loading (GPT-NeoX).
_FORMER_NAMES = ("embed_out.weight",)


def head_blocks(
    model_or_path: str | SentenceTransformer | Transformer | PreTrainedModel, **hub_kwargs: Any
) -> Iterator[Tensor]:
    """The rows of a language model's head W (V, D), in blocks of (up to :data:`BLOCK`, D).

    A backbone has no head of its own: it is the input embeddings where the two are tied, else it is read from the
    checkpoint, that one weight alone.

    Args:
        model_or_path: A language model's path or Hub id; or a loaded one, with or without its head; or a pipeline or
            module with one inside.
        **hub_kwargs: ``revision``, ``token``, ``cache_folder`` and ``local_files_only``, where a checkpoint is read.

    Raises:
        ValueError: If there is no head, or it is quantised.
    """
    if isinstance(model_or_path, str):
        return _checkpoint_blocks(model_or_path, **hub_kwargs)
    first: Any = model_or_path[0] if isinstance(model_or_path, SentenceTransformer) else model_or_path
    model = first.model if isinstance(first, Transformer) else first
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"A {type(model).__name__} has no language model's head: give a language model's path or Hub id, or a "
            "loaded one."
        )
    weight = _loaded_head(model)
    if weight is not None:
        return iter(_checked(weight, "The loaded head").split(BLOCK))
    path = model.config.name_or_path
    if not path:
        raise ValueError(
            f"{type(model).__name__} was loaded without its head and does not know from where: give the "
            "language model's path or Hub id."
        )
    return _checkpoint_blocks(path, **hub_kwargs)


def check_plain(config: Any) -> None:
    """Refuse an architecture whose head is more than a matrix.

    Raises:
        ValueError: If it has a bias, or the architecture has no language model.
    """
    with torch.device("meta"):
        try:
            head: Any = AutoModelForCausalLM.from_config(config).get_output_embeddings()
        except ValueError:
            head = None
    if head is None or getattr(head, "bias", None) is not None:
        why = "its head adds a bias" if head is not None else "it has no language model's head"
        raise ValueError(
            f"{type(config).__name__}: {why}, and a head is read as a matrix. Use another model, such as Llama, Qwen "
            "or Gemma."
        )


def _loaded_head(model: PreTrainedModel) -> Tensor | None:
    """The head, where it is in memory."""
    head = model.get_output_embeddings()
    if head is None and _is_tied(model.config):
        head = model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    # What accelerate has offloaded is nowhere.
    return None if weight is None or weight.is_meta else weight.detach()


def _is_tied(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


def _checkpoint_blocks(path: str, **hub_kwargs: Any) -> Iterator[Tensor]:
    asked = {"cache_dir" if name == "cache_folder" else name: value for name, value in hub_kwargs.items()}
    path = backbone_of(gguf.as_directory(path, {"model_kwargs": asked})[0])
    check_model(path, None, asked)
    names = _names(AutoConfig.from_pretrained(path, **asked))
    file = _file(path, names, **hub_kwargs)
    if file is None:
        raise _missing(path, names)
    yield from _blocks_of_file(file, names, path)


def _file(path: str, names: list[str], **hub_kwargs: Any) -> str | None:
    """Where the one file of a checkpoint that has the weight lies; no other is downloaded."""
    for index_name, whole_name in ((SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME), (WEIGHTS_INDEX_NAME, WEIGHTS_NAME)):
        if index := Module.load_file_path(path, index_name, **hub_kwargs):
            shards = checked_index(Path(index)).weight_map
            key = _find(names, shards)
            return Module.load_file_path(path, shards[key], **hub_kwargs) if key else None
        if whole := Module.load_file_path(path, whole_name, **hub_kwargs):
            return whole
    return None


def _names(config: Any) -> list[str]:
    """How the weight may be called in a checkpoint, prefixes apart, the likeliest first.

    The architecture says it, without its weights. A tied head is kept as the input embeddings or, seldom, as itself.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head: nn.Module = model.get_output_embeddings()
    layers = [model.get_input_embeddings(), head] if _is_tied(config) else [head]
    paths = [next(path for path, module in model.named_modules() if module is layer) for layer in layers]
    return [*(f"{path.split('.')[-1]}.weight" for path in paths), *_FORMER_NAMES]


def _find(names: list[str], keys: Any) -> str | None:
    """The key of the weight; the shortest, because layers for further tokens may carry one of that name, too."""
    keys = list(keys)
    for name in names:
        if found := [key for key in keys if key == name or key.endswith(f".{name}")]:
            return min(found, key=len)
    return None


def _blocks_of_file(file: str, names: list[str], path: str) -> Iterator[Tensor]:
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as weights:
            key = _find(names, weights.keys())
            if key is None:
                raise _missing(path, names)
            stored = weights.get_slice(key)
            for first in range(0, stored.get_shape()[0], BLOCK):
                yield _checked(stored[first : first + BLOCK], f"{key} in {path}")
        return
    check_torch_load_is_safe()
    state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    key = _find(names, state)
    if key is None:
        raise _missing(path, names)
    yield from _checked(state[key], f"{key} in {path}").split(BLOCK)


def _checked(weight: Tensor, name: str) -> Tensor:
    if weight.ndim != 2 or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise ValueError(
            f"{name} is {weight.dtype} of shape {tuple(weight.shape)}: a head is read in float32, float16 or bfloat16. "
            "Give the language model as it was before it was quantised."
        )
    return weight


def _missing(path: str, names: list[str]) -> ValueError:
    return ValueError(
        f"{path} has no weight named {' or '.join(names)}, so there is no language model's head. A model saved as an "
        "embedder keeps its backbone alone: give the path or Hub id of the language model that it was made from."
    )
