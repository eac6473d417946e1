"""Reading and changing states between the modules of a language model, while it runs.

A module that has been told to listen calls what :func:`hooked` names for it, in this thread and this block, and is
otherwise as it was. What is asked for travels in :mod:`st_reba.lm.context`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .context import current, entered


@dataclass(frozen=True)
class Hook:
    """What happens at one module.

    Attributes:
        before: Given the module's input, (B, N, D); returns what the module shall have instead.
        after: Given its output; returns what the rest of the model shall have instead.
    """

    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None


_listening = threading.Lock()


def listen(modules: Iterable[nn.Module]) -> None:
    """Let these modules be hooked, now and in copies of them; once, however many recipes and threads share them."""
    with _listening:
        for module in modules:
            if not listens(module):
                module.register_forward_pre_hook(_before, with_kwargs=True)
                module.register_forward_hook(_after)


def listens(module: nn.Module) -> bool:
    """Whether a module can be hooked."""
    return _before in module._forward_pre_hooks.values()


@contextlib.contextmanager
def hooked(hooks: Mapping[nn.Module, Hook]) -> Iterator[None]:
    """Hook modules, in this block, in this thread; after the hooks of a block around it."""
    listen(hooks)
    found = dict(current().hooks)
    for module, hook in hooks.items():
        found[id(module)] = (*found.get(id(module), ()), hook)
    with entered(hooks=found):
        yield


class Halt(Exception):  # noqa: N818 - nothing went wrong
    """Raised by a hook that has seen all that is wanted: what the model would do after it is not run."""


@contextlib.contextmanager
def until_halted() -> Iterator[None]:
    """A block that a hook may end by raising :class:`Halt`."""
    with contextlib.suppress(Halt):
        yield


# A graph would replay what it saw when it was traced, and never ask again who is listening.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hooks = [hook.before for hook in current().hooks.get(id(module), ()) if hook.before is not None]
    if not hooks:
        return None
    name = None if args else next(iter(kwargs))
    states = args[0] if name is None else kwargs[name]
    for hook in hooks:
        states = hook(states)
    return ((states, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: states})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    hooks = [hook.after for hook in current().hooks.get(id(module), ()) if hook.after is not None]
    if not hooks:
        return None
    # Some architectures hand on more than the states, which then come first.
    states = output[0] if isinstance(output, tuple) else output
    for hook in hooks:
        states = hook(states)
    return (states, *output[1:]) if isinstance(output, tuple) else states
