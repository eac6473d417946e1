"""States of a language model: picked by position, and looked at while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from ..text.layout import sent
from .hooks import Halt, Hook


def at(states: Tensor, position: Tensor) -> Tensor:
    """(B, D): of (B, N, D), the state at one position a row, (B,)."""
    position = sent(position, states.device)
    return states[torch.arange(len(states), device=states.device), position]


def put(states: Tensor, position: Tensor, values: Tensor) -> Tensor:
    """(B, N, D): the same with ``values`` (B, D) at one position a row, (B,)."""
    position = sent(position, states.device)
    return states.index_put((torch.arange(len(states), device=states.device), position), values.to(states))


class StatesAt:
    """An observer of states: what each of some modules is given, or gives, in one pass. It changes nothing.

    Args:
        modules: The modules, in the order in which their states are wanted.
        side: ``"before"``: what a module is given. ``"after"``: what it gives.
        position: (B,), the one position of each row that is looked at; None: all.
        halts: Whether the pass ends when all of them have been seen: :class:`st_reba.lm.hooks.Halt` is raised.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        side: Literal["before", "after"],
        position: Tensor | None = None,
        *,
        halts: bool = False,
    ) -> None:
        self.modules = list(modules)
        self.side = side
        self.position = position
        self.halts = halts
        self._seen: dict[nn.Module, Tensor] = {}

    def states(self) -> list[Tensor]:
        """For each module (B, D), on the device of ``position``; or, where all are looked at, (B, N, D)."""
        return [self._seen[module] for module in self.modules]

    def hooks(self) -> dict[nn.Module, Hook]:
        """What sees to it."""
        return {module: Hook(**{self.side: self._look(module)}) for module in self.modules}

    def _look(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        def look(states: Tensor) -> Tensor:
            self._seen[module] = states if self.position is None else at(states, self.position).to(self.position.device)
            if self.halts and len(self._seen) == len(self.modules):
                raise Halt
            return states

        return look
