"""Adapters of peft: put onto a model, merged into it, and checked before they are saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from ..lm.sizes import in_a_line
from ..lm.views import forget_adapters, is_borrowed, learned_prompt
from ..optional import require
from .checkpoints import ADAPTER_WEIGHTS, Files
from .saved_files import readable

# Beginning of the names of an adapter's weights, and the name of a loaded adapter.
_PREFIX, _NAME = "base_model.model.", "default"
# Parts of names in which peft keeps what it wraps.
_WRAPPED = (".base_layer.", ".original_module.", ".token_adapter.")


class Adapter:
    """Adapter of a model, loaded by peft: transformers leaves weights of some kinds, such as DoRA, as initialised.

    Args:
        name: Name in messages.
        config: Its configuration, of peft.
        weights: Its weights, named as peft saves them.

    Raises:
        ValueError: If it is a learned prompt.
    """

    def __init__(self, name: str, config: Any, weights: Mapping[str, Tensor]) -> None:
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise learned_prompt(name)
        self._name, self._config = name, config
        self._weights = {name.removeprefix(_PREFIX): weight for name, weight in weights.items()}
        if has_left_out_ranks(config):
            _fill_ranks(self._weights, config.rank_pattern)
            config.rank_pattern = None

    @classmethod
    def of(cls, files: Files) -> Self:
        """Read an adapter.

        Raises:
            FileNotFoundError: If it has no weights.
            ValueError: If it is a learned prompt.
            ImportError: If peft is not installed.
        """
        peft = _peft()
        weights = next(filter(None, map(files.find, ADAPTER_WEIGHTS)), None)
        if weights is None:
            lack = f"has an {ADAPTER_CONFIG_NAME} and no {ADAPTER_SAFE_WEIGHTS_NAME}"
            raise FileNotFoundError(f"{files} {lack}: get the whole adapter.")
        folder = str(weights.parent)
        with readable(f"{files}: its adapter cannot be read", "Get the whole adapter, or a later peft."):
            config, stored = peft.PeftConfig.from_pretrained(folder), peft.load_peft_weights(folder, device="cpu")
        return cls(f"the adapter {files}", config, stored)

    def fits(self, model: PreTrainedModel) -> bool:
        """Return whether its weights are named as in a model, with or without its head."""
        return _are_within(model, self.named_in(model))

    def named_in(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the weights by their names in a model, with or without its head."""
        prefix = f"{model.base_model_prefix}."
        if not hasattr(model, model.base_model_prefix):
            return {name.removeprefix(prefix): weight for name, weight in self._weights.items()}
        if _are_within(model, self._weights):
            return {**self._weights}
        return {prefix + name: weight for name, weight in self._weights.items()}

    def put_on(self, model: PreTrainedModel) -> dict[str, str]:
        """Put the adapter on a model, unless transformers did, and return the names of weights that it lacks.

        Args:
            model: The model. If it has no memory for its weights, the adapter's are taken as they are.

        Raises:
            ValueError: If peft cannot, or it has weights of layers that the model has not.
            NotImplementedError: If it reads weights for which the model has no memory.
        """
        peft, is_empty, name = _peft(), next(model.parameters()).is_meta, type(model).__name__
        before = {unadapted(name) for name in model.state_dict()}
        self._config.inference_mode = False
        with readable(f"peft cannot put {self._name} on {name}", unchanged=(NotImplementedError,) if is_empty else ()):
            if not hasattr(model, "peft_config"):
                inner = self._named_alike(model)
                peft.inject_adapter_in_model(self._config, inner, _NAME, low_cpu_mem_usage=is_empty)
                model.peft_config = inner.peft_config
            saved = peft.get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False)
            result = peft.set_peft_model_state_dict(
                model, self.named_in(model), _NAME, ignore_mismatched_sizes=True, low_cpu_mem_usage=is_empty
            )
        kind = peft.mapping.PEFT_TYPE_TO_PREFIX_MAPPING.get(self._config.peft_type, "")
        # Further weights may be those of the head.
        if lost := [weight for weight in result.unexpected_keys if _are_within(model, [weight]) and kind in weight]:
            raise ValueError(f"{self._name} has weights of layers that {name} has not, such as {min(lost)}")
        model._hf_peft_config_loaded = True
        model.requires_grad_(False)
        names = {name: name.replace(f".{_NAME}", "") for name in result.missing_keys if unadapted(name) not in before}
        # DoRA's names are saved without their end.
        return {name: "" for name, own in names.items() if own in saved or own.removesuffix(".weight") in saved}

    def _named_alike(self, model: PreTrainedModel) -> Any:
        """Return the module whose parts have the paths in the configuration, which may be those with a head."""
        prefix = model.base_model_prefix
        if hasattr(model, prefix):
            return model if _are_within(model, self._weights) else getattr(model, prefix)
        is_of_head = any(name.startswith(f"{prefix}.") for name in self._weights)
        return _Holder(model) if is_of_head and names_paths(self._config) else model


class _Holder(nn.Module):
    """Stand-in for a model with a head, with its body at the same path."""

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.config = body.config
        setattr(self, body.base_model_prefix, body)


def _peft() -> Any:
    return require("peft", "train", "An adapter")


def _are_within(model: PreTrainedModel, names: Iterable[str]) -> bool:
    """Return whether any of some names of weights begins with the name of a part of a model."""
    parts = dict(model.named_children())
    return any(name.partition(".")[0] in parts for name in names)


def has_left_out_ranks(config: Any) -> bool:
    """Return whether a configuration, of AdaLoRA, says which ranks of each layer are left."""
    return any(isinstance(ranks, list) for ranks in (getattr(config, "rank_pattern", None) or {}).values())


def _fill_ranks(weights: dict[str, Tensor], ranks: Mapping[str, list[bool]]) -> None:
    """Put zeros for the ranks of each layer that AdaLoRA has left out."""
    for name, kept in ranks.items():
        layer = name.removeprefix(_PREFIX).rpartition(".lora_E")[0]
        for part, axis in (("lora_E", 0), ("lora_A", 0), ("lora_B", 1)):
            weight = weights[f"{layer}.{part}"]
            if weight.shape[axis] < len(kept):
                shape = [len(kept) if axis == dimension else size for dimension, size in enumerate(weight.shape)]
                left = torch.tensor(kept).nonzero()[:, 0]
                weights[f"{layer}.{part}"] = weight.new_zeros(shape).index_copy(axis, left, weight)


def unadapted(name: str) -> str:
    """Return the name of a weight in the model without its adapter."""
    for part in _WRAPPED:
        name = name.replace(part, ".")
    return name


def weights_with(model: Any, name: str) -> dict[str, Tensor]:
    """Return the weights of a model with one of its adapters, named as if that were loaded."""
    others = [f".{other}." for other in model.peft_config if other != name]
    return {
        f"{weight}.".replace(f".{name}.", f".{_NAME}.").removesuffix("."): value
        for weight, value in model.state_dict().items()
        if not any(other in f"{weight}." for other in others)
    }


def names_paths(config: Any) -> bool:
    """Return whether an adapter's configuration names paths of layers, or patterns of them, not ends of their names."""
    targets = getattr(config, "target_modules", None) or ()
    is_path = isinstance(targets, str) or any("." in target for target in targets)
    return is_path or getattr(config, "layers_to_transform", None) is not None


def adapted_modules(model: Any) -> list[str]:
    """Return the paths of the adapted layers, without those in modules that the adapter has a whole copy of."""
    wrapped = tuple(f"{path}." for path, part in model.named_modules() if hasattr(part, "original_module"))
    return [path for path in _layers(model) if not path.startswith(wrapped)]


def _layers(model: Any) -> dict[str, Any]:
    """Return the adapted layers of a model by their paths."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {path: part for path, part in model.named_modules() if isinstance(part, BaseTunerLayer)}


def active(model: Any) -> list[str]:
    """Return the names of the adapters that a model has and uses.

    Raises:
        ValueError: If its adapters are disabled.
    """
    layers = _layers(model).values()
    if any(layer.disable_adapters for layer in layers):
        problem = "The adapter is disabled, and would be active in the saved model."
        raise ValueError(f"{problem} Call enable_adapters(), or delete_adapter() to leave it out.")
    return list(dict.fromkeys(name for layer in layers for name in layer.active_adapters))


def merge(model: Any) -> None:
    """Merge the active adapter into the weights of a model as peft does, and remove all adapters.

    Args:
        model: Model that :mod:`transformers` or peft gave an adapter.

    Raises:
        ValueError: If there is none, peft cannot merge it, or the weights belong to a model that the program has
            loaded. The model is then as it was.
        ImportError: If peft is not installed.
    """
    peft = _peft()
    if not getattr(model, "peft_config", None):
        raise ValueError(f"{type(model).__name__} has no adapter to merge.")
    if is_borrowed(model):
        problem = "The adapter belongs to a model that the program has loaded, whose weights would change."
        raise ValueError(f"{problem} Merge it there, with merge_and_unload(), and give that model.")
    names, layers = active(model), _layers(model).values()
    kinds = sorted({model.peft_config[name].peft_type for name in names})
    kind = " and ".join(str(getattr(kind, "value", kind)) for kind in kinds)
    # Several parts may wrap one another.
    adapted = {id(base): base for base in (layer.get_base_layer() for layer in layers)}.values()
    weights = [id(weight) for base in adapted for weight in base.parameters(recurse=False)]
    done = list[Any]()
    try:
        if len(kinds) != 1:
            raise ValueError(f"{len(kinds)} kinds of adapters are active")
        if len({*weights}) < len(weights):
            raise ValueError("layers share weights")
        for layer in layers:
            done.append(layer)
            layer.merge(safe_merge=True)
        _tuner(peft.PEFT_TYPE_TO_TUNER_MAPPING[kinds[0]], model, names).unload()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        for layer in (layer for layer in reversed(done) if layer.merged):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                layer.unmerge()
        problem = f"peft cannot merge this adapter of kind {kind} ({in_a_line(error)})."
        raise ValueError(f"{problem} It stays as it was.") from error
    forget_adapters(model)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


def _tuner(kind: Any, model: Any, names: list[str]) -> Any:
    """Return peft's tuner of a model that has an adapter already; made as usual, it would add another."""
    tuner = kind.__new__(kind)
    nn.Module.__init__(tuner)
    tuner.model, tuner.peft_config, tuner.active_adapter = model, model.peft_config, names
    return tuner
