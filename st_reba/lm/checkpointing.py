"""Gradient checkpointing: a layer that runs a second time, for its gradient, runs in the context of its first time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from .context import Context, current, resumed

# Private in transformers: what runs a layer so that it can be run again.
_RUNS_A_LAYER = "_gradient_checkpointing_func"


def remember_contexts(model: PreTrainedModel) -> None:
    """Let what replaces masks reach the second run of each layer, which comes when the pass is over.

    Raises:
        RuntimeError: If nothing in the model says how its layers are run again.
    """
    found = [module for module in model.modules() if hasattr(module, _RUNS_A_LAYER)]
    if not found:
        raise RuntimeError(
            f"{type(model).__name__} does not say how it runs a layer a second time, so its masks cannot be kept for "
            "that. Train it without gradient checkpointing, with smaller batches."
        )
    for module in found:
        run = getattr(module, _RUNS_A_LAYER)
        if not isinstance(run, _InContext):
            setattr(module, _RUNS_A_LAYER, _InContext(run))


@dataclass(frozen=True)
class _InContext:
    """Checkpoints a function together with the context in which it is called."""

    checkpoint: Callable[..., Any]

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(partial(_run, current(), function), *args, **kwargs)


def _run(context: Context, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with resumed(context):
        return function(*args, **kwargs)
