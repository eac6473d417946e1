"""Limits of configuration values and of model size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from transformers import AutoModel, PreTrainedConfig

# Far above what any model has: more is a mistake or an attack.

#: Number of layers. The deepest language models have some hundred.
MAX_LAYERS = 1024
#: Number of experts in a layer. Some models have several hundred.
MAX_EXPERTS = 4 * MAX_LAYERS
#: Number of labels of a classifier, for each of which transformers keeps a name. Some have some tens of thousands.
MAX_LABELS = 2**16
#: Any size, and number of positions.
MAX_SIZE = 2**31
#: Number of tokens. The largest vocabularies have a quarter of a million.
MAX_TOKENS = 2**24

# Size of a model in sizes of its checkpoint: a tied head is counted twice.
_TIMES = 2
# The same while it is built, when layers that share weights have weights of their own.
_TIMES_BUILDING = 16
# Numbers that need no checkpoint: tables of positions, masks.
_BUFFERS = 2**28


class SizeError(ValueError):
    """A configuration describes a larger model than its checkpoint holds."""


@contextmanager
def within_size(stored: int, file: object, times: int = _TIMES) -> Iterator[None]:
    """Raise when a model is built in this thread within the block that is far larger than its checkpoint.

    transformers builds a model without memory, and then gives it its weights: each of the two may be so large.

    Args:
        stored: Number of values that the checkpoint holds, at most.
        file: Source of the configuration.
        times: Number of checkpoints that the model may be as large as.

    Raises:
        SizeError: As soon as the model is larger.
    """
    thread = threading.get_ident()

    def watching(kind: str, most: int) -> Callable[[nn.Module, str, Tensor | None], None]:
        numbers, largest = {True: 0, False: 0}, torch.Size([0])

        def watch(module: nn.Module, name: str, tensor: Tensor | None) -> None:
            # The hook is global: other threads build models too.
            nonlocal largest
            if tensor is not None and threading.get_ident() == thread:
                numbers[tensor.is_meta] += tensor.numel()
                largest = max(largest, tensor.shape, key=prod)
                _check(kind, max(numbers.values()), largest, most, stored, file)

        return watch

    hooks = (
        modules.register_module_parameter_registration_hook(watching("weights", times * stored)),
        modules.register_module_buffer_registration_hook(watching("buffers", times * stored + _BUFFERS)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_size(config: PreTrainedConfig, stored: int, file: object, auto_class: Any = AutoModel) -> None:
    """Raise if a configuration describes more weights than a checkpoint can fill.

    The model is built without memory for its weights, and not to its end if there are far too many.

    Args:
        config: The configuration.
        stored: Number of values that the checkpoint holds, at most.
        file: Source of the configuration.
        auto_class: Class that builds the model.

    Raises:
        SizeError: If it does, with the shape of the largest weight.
        ValueError: If no model can be built of it.
        ImportError: If the model needs a package that is not installed.
    """
    try:
        with within_size(stored, file, _TIMES_BUILDING), torch.device("meta"):
            # Eager, because another implementation might be downloaded.
            model = auto_class.from_config(config, attn_implementation="eager")
    except (ImportError, MemoryError, SizeError):
        raise
    # A configuration that fits no model ends in any error of the model's code.
    except Exception as error:
        raise ValueError(f"{file} describes no model that can be built ({in_a_line(error)}). Get it anew.") from error
    for kind, tensors, more in (("weights", model.parameters(), 0), ("buffers", model.buffers(), _BUFFERS)):
        shapes = [tensor.shape for tensor in tensors]
        largest = max(shapes, key=prod, default=torch.Size([0]))
        _check(kind, sum(map(prod, shapes)), largest, _TIMES * stored + more, stored, file)


def _check(kind: str, numbers: int, largest: torch.Size, most: int, stored: int, file: object) -> None:
    if numbers > most:
        raise SizeError(
            f"{file} describes a larger model than its checkpoint holds: {numbers:,} numbers of {kind} or more, "
            f"the largest of shape {tuple(largest)}, where the checkpoint has {stored:,}. They are of two models: get "
            "both from one place."
        )


def in_a_line(error: BaseException) -> str:
    """Return the type and the message of an error in one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]}" if message else type(error).__name__
