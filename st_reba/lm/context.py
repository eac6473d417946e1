"""What the passes in a block are watched by and how they are changed: one object in one context variable.

Two threads, or two models that share weights, do not meet: each thread and each task has a context of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .all_layers import AllLayers
    from .attention.changes import Masking, Rerouting
    from .attention.observers import Observer
    from .hooks import Hook


@dataclass(frozen=True)
class Context:
    """What holds for the passes in a block.

    Attributes:
        observer: Is shown the attention of the layers that it wants to see.
        masking: Replaces the masks of the layers that it applies to.
        rerouting: Puts one token's key and value before all others.
        hooks: What happens at single modules, by the modules' ids.
        record: Keeps the states of all layers.
    """

    observer: Observer | None = None
    masking: Masking | None = None
    rerouting: Rerouting | None = None
    hooks: Mapping[int, tuple[Hook, ...]] = field(default_factory=dict)
    record: AllLayers | None = None


_NOTHING = Context()
_context: ContextVar[Context] = ContextVar("st_reba", default=_NOTHING)


def current() -> Context:
    """What holds here, in this thread."""
    return _context.get()


@contextlib.contextmanager
def entered(**parts: Any) -> Iterator[None]:
    """In this block, in this thread, let these parts of the context be others; the rest stays as it is around it."""
    with resumed(replace(_context.get(), **parts)):
        yield


@contextlib.contextmanager
def resumed(context: Context) -> Iterator[None]:
    """In this block, in this thread, let what held elsewhere hold."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)
