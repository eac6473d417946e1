"""The one door to a language model: a pass, what is changed in it, who looks on, and which states are wanted.

What holds in a pass stands in one object in one context variable, :class:`Pass`: two threads, or two models that share
weights, do not meet, as each thread and each task has a context of its own. A module that has been hooked once asks it
whenever it runs, and is otherwise as it was.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..text.layout import Layout
from .attention.changes import BehindPrefix, FirstKey, HiddenFirst, LayerMask
from .attention.observers import Census, Observer
from .backbone import device, is_checkpointing, keeping

# Private in transformers: what runs a layer so that it can be run again.
_RUNS_A_LAYER = "_gradient_checkpointing_func"


@dataclass(frozen=True)
class Hook:
    """What happens at one module.

    Attributes:
        before: Given the module's input, (B, N, D); returns what the module shall have instead.
        after: Given its output; returns what the rest of the model shall have instead.
    """

    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class PassChange:
    """What is changed in one pass.

    Attributes:
        masking: Replaces masks.
        rerouting: Puts one token's key and value before all others.
        hooks: What happens at single modules.
        hiding: Hides the first token from all others.
    """

    masking: LayerMask | None = None
    rerouting: FirstKey | None = None
    hooks: Mapping[nn.Module, Hook] = field(default_factory=dict)
    hiding: HiddenFirst | None = None


@dataclass(frozen=True)
class Before:
    """What stands before the tokens of a pass, as the model has computed it.

    Attributes:
        lengths: (B,), or (1,) for all rows: how many tokens.
        cache: Their keys and values. It keeps none of those that the pass computes.
    """

    lengths: Tensor
    cache: Cache


@dataclass(frozen=True)
class Pass:
    """What holds for the passes in a block.

    Attributes:
        before: What stands before the tokens that a pass is given.
        observer: Is shown the attention of the layers that it wants to see.
        masking: Replaces the masks of the layers that it applies to.
        rerouting: Puts one token's key and value before all others.
        hooks: What happens at single modules, by the modules' ids.
        hiding: Hides the first token from all others in the layers that it applies to.
        record: Keeps the states of all layers.
        census: Notes which layers have attention, and what it is like.
    """

    before: Before | None = None
    observer: Observer | None = None
    masking: LayerMask | None = None
    rerouting: FirstKey | None = None
    hooks: Mapping[int, tuple[Hook, ...]] = field(default_factory=dict)
    hiding: HiddenFirst | None = None
    record: AllLayers | None = None
    census: Census | None = None

    def changed_by(self, *changes: PassChange) -> Pass:
        """The same with further changes, whose hooks come after those that are there."""
        masking, rerouting, hiding, hooks = self.masking, self.rerouting, self.hiding, dict(self.hooks)
        for change in changes:
            assert change.masking is None or masking is None, "what cannot be combined is refused by the module"
            assert change.rerouting is None or rerouting is None, "what cannot be combined is refused by the module"
            assert change.hiding is None or hiding is None, "what cannot be combined is refused by the module"
            masking, rerouting = change.masking or masking, change.rerouting or rerouting
            hiding = change.hiding or hiding
            for module, hook in change.hooks.items():
                _listen(module)
                hooks[id(module)] = (*hooks.get(id(module), ()), hook)
        return replace(self, masking=masking, rerouting=rerouting, hiding=hiding, hooks=hooks)

    def at(self, attention: nn.Module) -> Pass:
        """What of it concerns the attention of one layer.

        Raises:
            RuntimeError: If the attention does not say which layer it is of.
        """
        observer, masking, rerouting, hiding = self.observer, self.masking, self.rerouting, self.hiding
        if all(each is None for each in (observer, masking, rerouting, hiding, self.census)):
            return self
        layer = getattr(attention, "layer_idx", None)
        if not isinstance(layer, int):
            raise RuntimeError(
                f"{type(attention).__name__} does not say which layer it is: its attention cannot be watched."
            )
        if observer is not None and not observer.wants(layer):
            observer = None
        if masking is not None and masking.layers is not None and layer not in masking.layers:
            masking = None
        if rerouting is not None and layer not in rerouting.layers:
            rerouting = None
        if hiding is not None and layer not in hiding.layers:
            hiding = None
        return replace(self, observer=observer, masking=masking, rerouting=rerouting, hiding=hiding)


_NOTHING = Pass()
_pass: ContextVar[Pass] = ContextVar("st_reba", default=_NOTHING)
_listening = threading.Lock()


def current() -> Pass:
    """What holds here, in this thread."""
    return _pass.get()


@contextlib.contextmanager
def passing(asked: Pass) -> Iterator[None]:
    """In this block, in this thread, let this hold."""
    token = _pass.set(asked)
    try:
        yield
    finally:
        _pass.reset(token)


def hooked(hooks: Mapping[nn.Module, Hook]) -> contextlib.AbstractContextManager[None]:
    """Hook modules, in this block, in this thread; after the hooks of a block around it."""
    return passing(current().changed_by(PassChange(hooks=hooks)))


def _listen(module: nn.Module) -> None:
    """Let a module ask what is to happen; once, however many recipes and threads share it."""
    with _listening:
        if _before not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_before, with_kwargs=True)
            module.register_forward_hook(_after)


def is_looked_at(module: nn.Module) -> bool:
    """Whether what a module is given or gives reaches anything here, in this thread, but the module after it."""
    others = [hook for hook in module._forward_hooks.values() if hook is not _after]
    return bool(others) or id(module) in current().hooks


# A graph would replay what it saw when it was traced, and never ask again what is to happen.
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


class Halt(Exception):  # noqa: N818 - nothing went wrong
    """Raised by a hook that has seen all that is wanted: what the model would do after it is not run."""


def at(states: Tensor, position: Tensor) -> Tensor:
    """(B, D): of (B, N, D), the state at one position a row, (B,)."""
    position = position.to(states.device, non_blocking=True)
    return states[torch.arange(len(states), device=states.device), position]


def put(states: Tensor, position: Tensor, values: Tensor) -> Tensor:
    """(B, N, D): the same with ``values`` (B, D) at one position a row, (B,)."""
    position = position.to(states.device, non_blocking=True)
    return states.index_put((torch.arange(len(states), device=states.device), position), values.to(states))


@dataclass(frozen=True, eq=False)
class StatesAt:
    """An observer of states: what each of some modules is given, or gives, in one pass. It changes nothing.

    Attributes:
        modules: The modules, in the order in which their states are wanted.
        side: ``"before"``: what a module is given. ``"after"``: what it gives.
        position: (B,), the one position of each row that is looked at; None: all.
        halts: Whether the pass ends when all of them have been seen: :class:`Halt` is raised.
    """

    modules: Sequence[nn.Module]
    side: Literal["before", "after"]
    position: Tensor | None = None
    halts: bool = field(default=False, kw_only=True)
    _seen: dict[nn.Module, Tensor] = field(default_factory=dict, init=False)

    def states(self) -> list[Tensor]:
        """For each module that was called, on its device, (B, D); or, where all are looked at, (B, N, D)."""
        return [self._seen[module] for module in self.modules if module in self._seen]

    def as_change(self) -> PassChange:
        """What sees to it: hooks that only look, at what the changes before it leave."""
        return PassChange(hooks={module: Hook(**{self.side: partial(self._look, module)}) for module in self.modules})

    def _look(self, module: nn.Module, states: Tensor) -> Tensor:
        self._seen[module] = states if self.position is None else at(states, self.position)
        if self.halts and len(self._seen) == len(self.modules):
            raise Halt
        return states


@dataclass
class AllLayers:
    """What the layers of a model gave in its last run.

    Attributes:
        given: Looks at what enters the first layer.
        gave: Looks at what each layer gives.
        norm: What is done to the states of every layer but the last.
        widths: How many values a state has in each layer, once they have been put side by side.
    """

    given: StatesAt
    gave: StatesAt
    norm: Callable[[Tensor], Tensor]
    widths: list[int] = field(default_factory=list)

    def beside(self, last: Tensor) -> Tensor:
        """(B, N, D_0 + ... + D_L), of which the last are ``last``, in place of what the last layer gave."""
        below = [*self.given.states(), *self.gave.states()[:-1]]
        layers = [*(self.norm(states).to(last.device) for states in below), last]
        self.widths = [states.shape[-1] for states in layers]
        return torch.cat(layers, dim=-1)

    def split(self, states: Tensor) -> tuple[Tensor, ...]:
        """Each layer's, of states side by side."""
        return tuple(layer.contiguous() for layer in states.split(self.widths, dim=-1))


@contextlib.contextmanager
def recording(
    model: PreTrainedModel, layers: Sequence[str], norm: Callable[[Tensor], Tensor] = lambda states: states
) -> Iterator[AllLayers]:
    """Record what the layers of a model give, in this block, in this thread, beside what it gives itself.

    A method reads tokens by choosing, moving and summing states. It does the same to all layers at once where they
    stand side by side, (B, N, D_0 + ... + D_L), and need not know: what :func:`run` gives is widened, and what was read
    is cut apart again by :meth:`AllLayers.split`. Not ``output_hidden_states=True``, for which transformers leaves
    hooks on a model that cannot be pickled.

    Args:
        model: The model.
        layers: Paths of its layers, in the order in which they run.
        norm: What is done to the states of every layer but the last, of which the model itself does it.
    """
    modules = [model.get_submodule(path) for path in layers]
    record = AllLayers(StatesAt(modules[:1], "before"), StatesAt(modules, "after"), norm)
    looked_at = current().changed_by(record.given.as_change(), record.gave.as_change())
    with passing(replace(looked_at, record=record)):
        yield record


def run(
    model: PreTrainedModel,
    layout: Layout,
    *,
    changes: Sequence[PassChange] = (),
    observe: Observer | None = None,
    inputs: Callable[[], Mapping[str, Any]] | None = None,
    reader: str = "it",
    **kwargs: Any,
) -> Tensor:
    """Run a language model once. No mask is needed where attention is causal, since rows are padded on the right.

    Args:
        model: The model, which ends at the layer that is wanted.
        layout: B texts.
        changes: What is changed in this pass; at most one of them replaces masks, one re-routes, and one hides.
        observe: Is shown attention as the changes leave it, of a model whose attention calls our function.
        inputs: Makes what the model is given, in the pass, in place of the layout's ``input_ids``.
        reader: Who asks, for the refusal.
        **kwargs: For the model's forward.

    Returns:
        (B, N, D), last hidden states, with the states of all layers side by side where they are recorded.

    Raises:
        ValueError: If the model is being trained with gradient checkpointing, and states are changed or looked at, or
            attention is.
        Halt: If a hook has seen all it wants.
    """
    given: Mapping[str, Any] = {}
    if inputs is None:
        given = {"input_ids": layout.input_ids.to(device(model), non_blocking=True)}
        if getattr(model, "takes_lengths", False):
            given = {**given, "lengths": layout.lengths}
        if (before := current().before) is not None:
            behind, masking = _behind(model, before, given["input_ids"])
            given, changes = {**given, **behind}, [*changes, PassChange(masking=masking)]
    asked = current().changed_by(*changes)
    if is_checkpointing(model):
        # What attention looks up, it looks up again in a layer's second run; a hook may have been meant for one time.
        if any(change.hooks for change in changes) or observe is not None:
            raise ValueError(
                "Gradient checkpointing runs each layer a second time, when nothing is watched and no state is "
                f"changed. Turn it off to train through {reader}."
            )
        if asked.masking is not None or asked.rerouting is not None or asked.hiding is not None:
            _remember_passes(model)
    # transformers would leave hooks on a model that hands out its hidden states, which cannot be pickled.
    outputs = {"return_dict": True, "output_hidden_states": False}
    with passing(asked if observe is None else replace(asked, observer=observe)):
        output = model(**{**(given if inputs is None else inputs()), **kwargs, **outputs})
    last = output.last_hidden_state
    return last if asked.record is None else asked.record.beside(last)


def _behind(model: PreTrainedModel, before: Before, input_ids: Tensor) -> tuple[dict[str, Any], BehindPrefix]:
    """What a model is given besides, to read tokens (B, N) behind others, and what they see of these."""
    lengths, new = before.lengths.to(input_ids.device, non_blocking=True), input_ids.shape[1]
    positions = (lengths[:, None] + torch.arange(new, device=lengths.device)).expand(len(input_ids), -1)
    return {"position_ids": positions, **keeping(model, before.cache)}, BehindPrefix(lengths, new)


def _remember_passes(model: PreTrainedModel) -> None:
    """Let what replaces masks reach the second run of each layer, for its gradient, which comes when the pass is over.

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
        checkpoint = partial(getattr(module, _RUNS_A_LAYER), use_reentrant=False, context_fn=_first_and_second_run)
        setattr(module, _RUNS_A_LAYER, checkpoint)


def _first_and_second_run() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """What holds in a layer's first run does by itself; in its second, what does now."""
    return contextlib.nullcontext(), passing(current())
