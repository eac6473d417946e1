"""Saving of modules: what would not load again is refused, and the files of sentence-transformers are completed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, utils
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from ..lm.llama_cpp import MODEL_TYPE
from ..lm.sizes import in_a_line
from ..lm.views import decoder_of, is_borrowed, unwrap_children
from ..version import REQUIREMENT
from . import adapters
from .checkpoints import SAVED_MODEL, Files, is_noted, read_config
from .saved_files import read_object, readable


@contextmanager
def saving(model: Any) -> Iterator[None]:
    """Raise if a model would not load again as it is saved within the block.

    Args:
        model: Language model of a module, which may have an adapter.

    Raises:
        ValueError: If it would not, with the remedy.
    """
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "peft_config"):
        with _saving_adapter(model):
            yield
        return
    # peft leaves the wrappers of an adapter that was deleted.
    unwrap_children(model)
    # Others are made in another way: those with code of their own, those in llama.cpp, and quantised ones.
    is_plain = not getattr(model.config, "auto_map", None) and model.config.model_type != MODEL_TYPE
    if is_plain and getattr(model, "hf_quantizer", None) is None:
        problem = f"{type(model).__name__} cannot be saved, because its configuration could not be read again"
        with readable(problem, "Use another model."):
            made = _made_of(type(model.config).from_dict(model.config.to_diff_dict()))
        weights, described = model.state_dict(), made.state_dict()
        if wrong := _differing(weights, described) or _differing(described, weights):
            raise ValueError(
                f"{type(model).__name__} cannot be saved, because its configuration describes another model: {wrong}. "
                "Use output_layer=None, or change the configuration too, as resize_token_embeddings() does."
            )
    yield


@contextmanager
def _saving_adapter(model: Any) -> Iterator[None]:
    """Raise if an adapter would not load again, and let peft write the place of the model that it is for."""
    names, configs = adapters.active(model), model.peft_config
    config = copy.copy(configs[names[0]])
    if adapters.names_paths(config) and not getattr(config, "target_parameters", None):
        # They may be paths in a model with a head.
        config.target_modules = {*adapters.adapted_modules(model)}
        for name in ("layers_to_transform", "layers_pattern"):
            if hasattr(config, name):
                setattr(config, name, None)
    if adapters.has_left_out_ranks(config):
        # AdaLoRA's ranks that are left out are zero: peft would cut them off, and needs a class of its own for that.
        config.rank_pattern = None
    config.revision = getattr(model, "st_reba_revision", config.revision)
    model.peft_config = {**configs, names[0]: config}
    try:
        _check_adapters(model, names)
        yield
    finally:
        model.peft_config = configs


def _check_adapters(model: Any, names: list[str]) -> None:
    """Raise if active adapters would not load again, and note the place of the model that they are for."""
    config = model.peft_config[names[0]]
    try:
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} are active, and one can be saved")
        # The adapter's configuration comes second: it may have been given to several models.
        name = model.name_or_path or config.base_model_name_or_path
        config.base_model_name_or_path, base = _base_of(name, config.revision, model.config)
        if not getattr(base, "auto_map", None) and getattr(model, "hf_quantizer", None) is None:
            _check_adapter(model, names[0], base)
    # KeyError is raised by peft, for weights that it keeps outside of the layers.
    except (KeyError, ValueError) as error:
        reason = str(error).rstrip(".") if type(error) is ValueError else in_a_line(error)
        here = "with st_reba.train.merge_adapter()"
        how = "where the model was loaded, with merge_and_unload()" if is_borrowed(model) else here
        raise ValueError(f"The adapter cannot be saved: {reason}. Merge it first, {how}, or use LoRA.") from error


def _base_of(name: str, revision: str | None, config: PreTrainedConfig) -> tuple[str, PreTrainedConfig]:
    """Return the place of the model that an adapter is for, and its configuration: the given one if it has no file.

    Raises:
        ValueError: If it has no place.
    """
    files = Files("", {}).of_base(name or "", revision)
    if Path(files.name).is_dir() and name:
        return str(Path(files.name).resolve()), read_config(files)
    if not name or Path(name).is_absolute():
        raise ValueError(f"the model that it is for was not loaded from files, or these are gone: {name or 'no name'}")
    return name, config if files.find(utils.CONFIG_NAME) is None else read_config(files)


def _check_adapter(model: Any, name: str, base: PreTrainedConfig) -> None:
    """Raise if an adapter would not be the same on the model that it is for."""
    from peft import get_peft_model_state_dict

    weights = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    if len({weight.data_ptr() for weight in weights.values()}) < len(weights):
        raise ValueError("its layers share weights")
    config = copy.deepcopy(model.peft_config[name])
    if isinstance(getattr(config, "init_lora_weights", None), str):
        # It would read the weights of the model.
        config.init_lora_weights = True
    made = _made_of(base)
    try:
        lacking = adapters.Adapter("it", config, weights).put_on(made)
    except NotImplementedError:
        # Some kinds are made of the weights of the model, which is not loaded for this.
        return
    expected = adapters.weights_with(model, name)
    if wrong := _differing(expected, made.state_dict()) or next(iter(lacking.keys() & expected.keys()), ""):
        raise ValueError(f"it would not be the same on the model that it is for: {wrong}")


def _made_of(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model without weights that transformers makes of a configuration."""
    with torch.device("meta"):
        # Eager, because another implementation might be downloaded.
        return decoder_of(AutoModel.from_config(config, attn_implementation="eager"))


def _differing(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> str:
    """Return the first weight that is missing among others, or has another shape there; empty if there is none."""
    for name, weight in weights.items():
        if name not in others:
            return f"{name} is in one of them alone"
        if weight.shape != others[name].shape:
            return f"{name} is of shape {tuple(weight.shape)}, and of {tuple(others[name].shape)} there"
    return ""


def complete(directory: Path) -> None:
    """Complete the files that sentence-transformers has written of a module with a language model."""
    path = directory / TOKENIZER_CONFIG_FILE
    config = read_object(path) if path.is_file() else {}
    # The tokenizer of a multimodal model names the processor, of texts and images, that it was a part of.
    if config.pop("processor_class", None) is not None:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    note_requirement(directory)


def note_requirement(directory: Path) -> None:
    """Note in the files that sentence-transformers has written that st_reba is needed to load the model.

    A first module in a directory of its own also gets a ``config.json`` in the model's root that names st_reba, for
    programs that look for a language model there. An existing file stays; but one of ours would be taken for the base
    model of an adapter that is now in the root.

    Args:
        directory: Directory of the module: the model's own, or one right below it.
    """
    settings = "config_sentence_transformers.json"
    root = next((root for root in (directory, directory.parent) if (root / settings).is_file()), None)
    if root is None:
        return
    content = json.loads((root / settings).read_text(encoding="utf-8"))
    content["requirements"] = {**content.get("requirements", {}), **REQUIREMENT}
    (root / settings).write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
    config = root / utils.CONFIG_NAME
    if (root / ADAPTER_CONFIG_NAME).is_file():
        if is_noted(config):
            config.unlink()
    elif directory != root and directory.name.startswith("0_") and not config.exists():
        note = {"load_with": "sentence-transformers, after import st_reba", "model_type": SAVED_MODEL}
        config.write_text(json.dumps(note, indent=2), encoding="utf-8")
