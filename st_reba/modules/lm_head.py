"""Head of a language model: read from a checkpoint in blocks, or kept by a module whose backbone has none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from os import PathLike, fspath
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..hub.checkpoints import Files, check_model, read_config
from ..hub.loading import ModelSource, backbone_of
from ..hub.saved_files import fetching, shards_of
from ..lm import gguf
from ..lm.views import unwrapped
from .stored import check_magnitudes

#: Number of the head's rows, tokens of the vocabulary, in a block.
BLOCK = 4096

# Names of heads in checkpoints, without prefixes; GPT-NeoX's is the second before a renaming in transformers.
_HEADS = ("lm_head.weight", "embed_out.weight")
# The same of input embeddings.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "embeddings.weight")


def own_head(backbone: PreTrainedModel, file: str, model_kwargs: Any, source: ModelSource) -> Tensor | None:
    """Return the head of a language model that was loaded without it; None if it is the input embeddings.

    Otherwise the head is the one that the module saved, that of a loaded language model, or that of the checkpoint.

    Args:
        backbone: Language model without its head. Its configuration has the path or Hub id of the checkpoint.
        file: Name of the file in which the module saves the head, as ``weight``.
        model_kwargs: Arguments with which the backbone was loaded.
        source: First argument of the module.

    Returns:
        (V, D), in the backbone's precision, on its device.

    Raises:
        ValueError: If there is no head, it has a bias, or the file contains that of another model.
    """
    _check_matrix(backbone.config)
    files = Files(backbone.config.name_or_path or "", model_kwargs or {})
    saved = files.find(file) if files.name else None
    if saved is not None:
        weight = load_file(saved).get("weight")
        width = backbone.config.get_text_config(decoder=True).hidden_size
        if weight is None or weight.ndim != 2 or weight.shape[1] != width:
            raise ValueError(f"{saved} has no head of this model: save the model again.")
        check_magnitudes({"weight": weight}, str(saved))
    elif _is_tied(backbone.config):
        return None
    else:
        loaded = None if isinstance(source, str | PathLike | Transformer) else _loaded_head(unwrapped(source))
        weight = torch.cat([*head_blocks(backbone, **files.where)]) if loaded is None else loaded
    return weight.to(backbone.device, backbone.dtype)


def scale_logits(logits: Tensor, config: Any) -> Tensor:
    """Scale and cap products with the head as the configuration of the language model says."""
    config = config.get_text_config(decoder=True)
    # Cohere has the first of these settings, Granite the second, and Gemma 2 the cap.
    logits = logits * (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def head_blocks(
    model_or_path: str | PathLike[str] | SentenceTransformer | Transformer | PreTrainedModel, **hub_kwargs: Any
) -> Iterator[Tensor]:
    """Return the rows of a language model's head W (V, D), in blocks of up to :data:`BLOCK` rows.

    The head of a backbone is its input embeddings if the two are tied. Otherwise that one weight is read from the
    checkpoint.

    Args:
        model_or_path: Path or Hub id of a language model; or a loaded one, with or without its head; or a pipeline or
            module that contains one.
        **hub_kwargs: ``revision``, ``token``, ``cache_folder`` and ``local_files_only`` of a checkpoint.

    Raises:
        ValueError: If there is no head, or it is quantised.
    """
    where = {"cache_dir" if name == "cache_folder" else name: value for name, value in hub_kwargs.items()}
    if isinstance(model_or_path, str | PathLike):
        return _checkpoint_blocks(fspath(model_or_path), where)
    first: Any = model_or_path[0] if isinstance(model_or_path, SentenceTransformer) else model_or_path
    model = first.model if isinstance(first, Transformer) else first
    weight = _loaded_head(model) if isinstance(model, PreTrainedModel) else None
    if weight is not None:
        return iter(weight.split(BLOCK))
    if not isinstance(model, PreTrainedModel) or not model.config.name_or_path:
        problem = f"{type(model).__name__} has no language model's head, and does not know from where it was loaded:"
        raise ValueError(f"{problem} give the language model's path or Hub id, or a loaded one.")
    return _checkpoint_blocks(model.config.name_or_path, where)


def _loaded_head(model: PreTrainedModel) -> Tensor | None:
    """Return the head of a loaded model, (V, D), not copied; None if there is none, or accelerate has offloaded it."""
    head = model.get_output_embeddings()
    if head is None and _is_tied(model.config):
        head = model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    return None if weight is None or weight.is_meta else _checked(weight.detach(), "The loaded head")


def _check_matrix(config: Any) -> None:
    """Raise if the head of an architecture is more than a matrix.

    Raises:
        ValueError: If it has a bias, or the architecture has no language model.
    """
    with torch.device("meta"):
        try:
            head: Any = AutoModelForCausalLM.from_config(config).get_output_embeddings()
        except ValueError:
            head = None
    if head is None or getattr(head, "bias", None) is not None:
        raise ValueError(
            f"{type(config).__name__} has no language model's head, or its head adds a bias, and a head is read as a "
            "matrix. Use another model, such as Llama, Qwen or Gemma."
        )


def _is_tied(config: Any) -> bool:
    return bool(getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False))


def _checkpoint_blocks(path: str, where: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the head in a checkpoint. Only the file that contains it is fetched."""
    with fetching(path):
        files = Files(backbone_of(gguf.as_directory(path, {"model_kwargs": where})[0]), where)
        check_model(files.name, {}, where)
        # Most tied heads are saved as the input embeddings.
        names = (*_EMBEDDINGS, *_HEADS) if _is_tied(read_config(files)) else _HEADS
    index = files.find(SAFE_WEIGHTS_INDEX_NAME)
    shards = {} if index is None else shards_of(index)
    name = SAFE_WEIGHTS_NAME if index is None else shards.get(_find(names, shards) or "")
    file = None if name is None else files.find(name)
    if file is not None:
        with safe_open(file, framework="pt") as weights:
            key = _find(names, weights.keys())
            if key is not None:
                stored = weights.get_slice(key)
                for first in range(0, stored.get_shape()[0], BLOCK):
                    yield _checked(stored[first : first + BLOCK], f"{key} in {files}")
                return
    raise ValueError(
        f"{files} has no weight named {' or '.join(names)} in files of safetensors, so there is no language model's "
        "head. A model saved as an embedder keeps its backbone alone: give the path or Hub id of the language model "
        "that it was made from. One that is saved in .bin files is to be saved again. One with a head of another name "
        "is to be loaded by AutoModelForCausalLM and given as it is."
    )


def _find(names: Sequence[str], keys: Collection[str]) -> str | None:
    """Return the shortest key of the weight: layers that predict further tokens may have one of that name, too."""
    for name in names:
        if fitting := [key for key in keys if key == name or key.endswith(f".{name}")]:
            return min(fitting, key=len)
    return None


def _checked(weight: Tensor, name: str) -> Tensor:
    if weight.ndim != 2 or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise ValueError(
            f"{name} is {weight.dtype} of shape {tuple(weight.shape)}: a head is read in float32, float16 or bfloat16. "
            "Give the language model as it was before it was quantised."
        )
    return weight
