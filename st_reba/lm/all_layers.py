"""The states of all layers, carried beside those of the last through whatever a method does with these.

A method reads tokens by choosing, moving and summing states. It does the same to all layers at once where they stand
side by side, (B, N, D_0 + ... + D_L), and need not know: inside :func:`recording`, what a backbone gives is widened by
:func:`beside`, and what was read is cut apart again by :meth:`AllLayers.split`.

Layers are recorded by hooks of our own and not by ``output_hidden_states=True``, for which transformers leaves some on
a model that cannot be pickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .anatomy import layer_paths
from .context import current, entered
from .hooks import Hook, hooked


class AllLayers:
    """What the layers of a model gave in its last run.

    Args:
        norm: What is done to the states of every layer but the last.
    """

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        self._norm = norm
        self._states: list[Tensor] = []
        self._widths: list[int] = []

    def enter(self, states: Tensor) -> Tensor:
        """A run begins: what enters the first layer."""
        self._states = [states]
        return states

    def leave(self, states: Tensor) -> Tensor:
        """What a layer gives."""
        self._states.append(states)
        return states

    def beside(self, last: Tensor) -> Tensor:
        """(B, N, D_0 + ... + D_L), of which the last are ``last``, in place of what the last layer gave."""
        below, self._states = self._states[:-1], []
        layers = [*(self._norm(states).to(last.device) for states in below), last]
        self._widths = [states.shape[-1] for states in layers]
        return torch.cat(layers, dim=-1)

    def last(self, states: Tensor) -> Tensor:
        """The last layer's, of states side by side."""
        return states[..., -self._widths[-1] :]

    def split(self, states: Tensor) -> tuple[Tensor, ...]:
        """Each layer's, of states side by side."""
        return tuple(layer.contiguous() for layer in states.split(self._widths, dim=-1))


@contextlib.contextmanager
def recording(model: PreTrainedModel, norm: Callable[[Tensor], Tensor] = lambda states: states) -> Iterator[AllLayers]:
    """Record what the layers of a model give, in this block, in this thread.

    Args:
        model: The model.
        norm: What is done to the states of every layer but the last, of which the model itself does it.
    """
    record = AllLayers(norm)
    modules = [model.get_submodule(path) for path in layer_paths(model)]
    hooks = {
        module: Hook(before=None if index else record.enter, after=record.leave) for index, module in enumerate(modules)
    }
    with entered(record=record), hooked(hooks):
        yield record


def beside(last: Tensor) -> Tensor:
    """What a backbone gives, (B, N, D), with what its earlier layers gave before it where they are recorded."""
    record = current().record
    return last if record is None else record.beside(last)


def last_layer(states: Tensor) -> Tensor:
    """The last layer's states, (..., D), of what :func:`beside` gave."""
    record = current().record
    return states if record is None else record.last(states)
