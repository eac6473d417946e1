"""Whether a configuration describes a model of the size that its checkpoint has, before memory is taken for it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import AutoModel, PreTrainedConfig

#: How many times what a checkpoint holds its model may have: weights that are tied are counted twice.
_TIMES = 2
#: Numbers that need no checkpoint: tables of positions, masks.
_BUFFERS = 2**28


class SizeError(ValueError):
    """A configuration asks for another model than its checkpoint holds: told in a sentence."""


def check_size(config: PreTrainedConfig, stored: int, file: object, auto_class: Any = AutoModel) -> None:
    """Refuse a configuration that describes more weights than a checkpoint can fill.

    The model is built without memory for its weights, and no further than to the weight that is too much.

    Args:
        config: The configuration.
        stored: How many numbers the checkpoint holds, at most.
        file: What the configuration was read from.
        auto_class: What builds the model.

    Raises:
        SizeError: If it does, with the shape of that weight.
        ValueError: If no model can be built of it.
        ImportError: If the model needs a package that is not there.
    """
    thread = threading.get_ident()
    made = {"weights": 0, "buffers": 0}
    most = {"weights": _TIMES * stored, "buffers": _TIMES * stored + _BUFFERS}

    def count(kind: str, tensor: Tensor | None) -> None:
        # The hooks are torch's for all modules, those that other threads make included.
        if tensor is None or threading.get_ident() != thread:
            return
        made[kind] += tensor.numel()
        if made[kind] > most[kind]:
            raise SizeError(
                f"{file} describes a larger model than its checkpoint holds: {kind} of more than {most[kind]:,} "
                f"numbers, among them one of shape {tuple(tensor.shape)}, where the checkpoint has {stored:,} numbers. "
                "They are of two models: get both from one place."
            )

    def count_parameter(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        count("weights", tensor)

    def count_buffer(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        count("buffers", tensor)

    hooks = [
        register_module_parameter_registration_hook(count_parameter),
        register_module_buffer_registration_hook(count_buffer),
    ]
    try:
        with torch.device("meta"):
            # Attention has no weights; any other implementation might be fetched.
            auto_class.from_config(config, attn_implementation="eager")
    except (ImportError, MemoryError, ValueError):
        raise
    # A configuration that fits no model ends in whatever its numbers do to the model's code.
    except Exception as error:
        raise ValueError(f"{file} describes no model that can be built ({in_a_line(error)}). Get it anew.") from error
    finally:
        for hook in hooks:
            hook.remove()


def in_a_line(error: BaseException) -> str:
    """An error of a library in one line: its type, and what it says."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__
