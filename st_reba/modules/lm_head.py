"""The language model's head: read block by block, without the language model, and kept beside a backbone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..hub.saved_files import fetching, shards_of
from ..lm import gguf
from ..lm.loaded import unwrapped
from .checkpoints import Files, backbone_of, check_model, read_config
from .stored import check_magnitudes

#: Rows of the head (tokens of the vocabulary) in a block.
BLOCK = 4096

# How a head is called in checkpoints, prefixes apart; in the second way before transformers renamed GPT-NeoX's.
_HEADS = ("lm_head.weight", "embed_out.weight")
# The same of input embeddings.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "embeddings.weight")


class Head(nn.Module):
    """The language model's head, or the rows of some tokens, for a module that reads it beside its backbone.

    A backbone has no head. Where the head is tied to the input embeddings, they are it; else it is read from where the
    module saved it, or from the language model's checkpoint.

    Args:
        backbone: A language model without its head, which knows where it was loaded from.
        file: Under which name the module saves it beside the backbone.
        model_kwargs: What the backbone was loaded with.
        rows: The tokens whose rows are read. None: all, which need not be kept where they are the input embeddings.
        source: What the backbone was made of. If that is a loaded language model, the head is its own.

    Raises:
        ValueError: If there is no head, it has a bias, or the file has that of another model.
    """

    #: (V, D), or the rows that are read, in the backbone's precision; None: it is the input embeddings.
    weight: Tensor | None

    def __init__(
        self,
        backbone: PreTrainedModel,
        file: str,
        model_kwargs: Any = None,
        rows: Sequence[int] | None = None,
        source: str | PathLike[str] | nn.Module = "",
    ) -> None:
        super().__init__()
        check_plain(backbone.config)
        self.file, self.rows = file, rows
        files = Files(backbone.config.name_or_path or "", model_kwargs or {})
        saved = files.find(file) if files.name else None
        weight: Tensor | None = None
        if saved is not None:
            weight = self._saved(saved, backbone)
        elif rows is not None or not _is_tied(backbone.config):
            own = None if isinstance(source, str | PathLike | Transformer) else _loaded_head(unwrapped(source))
            weight = torch.cat([*head_blocks(backbone, **files.where)]) if own is None else own
            weight = weight if rows is None else weight[[*rows]]
        weight = None if weight is None else weight.to(backbone.device, backbone.dtype)
        self.register_buffer("weight", weight, persistent=False)

    def _saved(self, file: Path, backbone: PreTrainedModel) -> Tensor:
        weight = load_file(file).get("weight")
        width = backbone.config.get_text_config(decoder=True).hidden_size
        count = None if self.rows is None else len(self.rows)
        if weight is None or weight.ndim != 2 or weight.shape[1] != width or count not in (None, len(weight)):
            raise ValueError(f"{file} has no head of this model: save the model again.")
        check_magnitudes({"weight": weight}, str(file))
        return weight

    def of(self, backbone: PreTrainedModel) -> Tensor:
        """(V, D), or the rows that are read."""
        return cast(Tensor, backbone.get_input_embeddings().weight) if self.weight is None else self.weight

    def save(self, directory: str) -> None:
        """Save it beside the backbone, where it is not the backbone's own."""
        if self.weight is not None:
            weight = self.weight.detach().cpu().contiguous()
            save_file({"weight": weight}, str(Path(directory) / self.file), metadata={"format": "pt"})


def at_its_end(settings: dict[str, Any], module: type) -> dict[str, Any]:
    """The settings with which a :class:`CausalTransformer` reads the last token of its prompt.

    Raises:
        ValueError: If they say something else.
    """
    found = {"pool_over": "all", "rows": "last", **settings}
    if (found["pool_over"], found["rows"]) != ("all", "last"):
        raise ValueError(
            f'{module.__name__} reads the last token of its prompt: pool_over="all" and rows="last" are all '
            "it can do; leave them out."
        )
    return found


def scaled(logits: Tensor, config: Any) -> Tensor:
    """Logits of the language model from products with its head, scaled and capped as its configuration says."""
    config = config.get_text_config(decoder=True)
    # Cohere has the first of these settings, Granite the second, and Gemma 2 the cap.
    logits = logits * (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def head_blocks(
    model_or_path: str | PathLike[str] | SentenceTransformer | Transformer | PreTrainedModel, **hub_kwargs: Any
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
    asked = {"cache_dir" if name == "cache_folder" else name: value for name, value in hub_kwargs.items()}
    if isinstance(model_or_path, str | PathLike):
        return _checkpoint_blocks(fspath(model_or_path), asked)
    first: Any = model_or_path[0] if isinstance(model_or_path, SentenceTransformer) else model_or_path
    model = first.model if isinstance(first, Transformer) else first
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"A {type(model).__name__} has no language model's head: give a language model's path or Hub id, or a "
            "loaded one."
        )
    weight = _loaded_head(model)
    if weight is not None:
        return iter(weight.split(BLOCK))
    path = model.config.name_or_path
    if not path:
        raise ValueError(
            f"{type(model).__name__} was loaded without its head and does not know from where: give the "
            "language model's path or Hub id."
        )
    return _checkpoint_blocks(path, asked)


def _loaded_head(model: PreTrainedModel) -> Tensor | None:
    """The head of a loaded model, (V, D), not copied; None if it has none, or accelerate has offloaded it."""
    head = model.get_output_embeddings()
    if head is None and _is_tied(model.config):
        head = model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    return None if weight is None or weight.is_meta else _checked(weight.detach(), "The loaded head")


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


def _is_tied(config: Any) -> bool:
    return bool(getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False))


def _checkpoint_blocks(path: str, asked: dict[str, Any]) -> Iterator[Tensor]:
    """The head in a checkpoint; no other file than the one that it is in is fetched."""
    with fetching(path):
        files = Files(backbone_of(gguf.as_directory(path, {"model_kwargs": asked})[0]), asked)
        check_model(files.name, None, asked)
        # A tied head is kept as the input embeddings or, seldom, as itself.
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
    """The key of the weight; the shortest, because layers for further tokens may carry one of that name, too."""
    for name in names:
        found = [key for key in keys if key == name or key.endswith(f".{name}")]
        if found:
            return min(found, key=len)
    return None


def _checked(weight: Tensor, name: str) -> Tensor:
    if weight.ndim != 2 or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise ValueError(
            f"{name} is {weight.dtype} of shape {tuple(weight.shape)}: a head is read in float32, float16 or bfloat16. "
            "Give the language model as it was before it was quantised."
        )
    return weight
