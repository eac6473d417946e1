"""Weights in few bits, as a settings file asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from typing import Any

from transformers import TorchAoConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from ..optional import require

_EXAMPLES = (
    "quantization_config: {quant_method: bitsandbytes, load_in_4bit: true} or {quant_method: torchao, quant_type: "
    "Int8WeightOnlyConfig}"
)


def with_quantization(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``model_kwargs`` with a ``quantization_config`` that transformers takes, where a file has one in words.

    ``quant_method`` names the package. With torchao ``quant_type`` names one of its configurations, and what stands
    beside it is given to that; with others all is given to transformers' configuration of the method.

    Raises:
        ValueError: If it is not of that form.
        ImportError: If the package is not installed.
    """
    given = model_kwargs.get("quantization_config")
    if not isinstance(given, Mapping):
        return dict(model_kwargs)
    return {**model_kwargs, "quantization_config": _read(dict(given))}


def _read(given: dict[str, Any]) -> Any:
    method = given.get("quant_method")
    try:
        if method == "torchao":
            return _torchao(given)
        # transformers takes what says that it is to be in so many bits for bitsandbytes' own.
        if method == "bitsandbytes" or given.get("load_in_4bit") or given.get("load_in_8bit"):
            require("bitsandbytes", "qlora", "A quantised backbone")
        return AutoQuantizationConfig.from_dict(given)
    except PackageNotFoundError as error:
        raise ImportError(f"quantization_config: {method} is not installed ({error}).") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"model_kwargs: quantization_config: {error} Such as {_EXAMPLES}.") from error


def _torchao(given: dict[str, Any]) -> TorchAoConfig:
    kinds = require("torchao.quantization", "qlora", "A quantised backbone")
    options = {name: value for name, value in given.items() if name not in ("quant_method", "quant_type")}
    name = given.get("quant_type")
    known = [kind for kind in dir(kinds) if kind.endswith("Config")]
    if name not in known:
        raise ValueError(f"quant_type: {name!r} is none of torchao's: {', '.join(known)}.")
    return TorchAoConfig(getattr(kinds, name)(**options))
