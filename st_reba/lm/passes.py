"""One pass of a language model, and the hooks that act in it.

Everything that a method asks of a pass beyond its result is a :class:`Hook`: to read a state, to change one, to watch
attention, to replace a mask. The hooks of a pass are in one context variable, so passes of other threads on the same
weights do not see them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

# Attribute of transformers' modules, private: the function that runs a layer so that it can run again.
_CHECKPOINT = "_gradient_checkpointing_func"


#: Side of a module: its input or its output.
Side = Literal["before", "after"]


@dataclass
class AttentionCall:
    """One call of a layer's attention. Hooks may change it before it is computed.

    Attributes:
        layer: Index of the layer.
        query: (B, H, N, d).
        key: (B, G, M, d) with G key-value heads; the last N keys are those of the layout, others belong to its past.
        value: (B, G, M, d).
        mask: Boolean, True for visible keys, or added to the scores, broadcastable to (B, H, N, M); None if there is
            none.
        causal: Whether a query sees no later keys where ``mask`` is None.
        scale: Factor of the dot products.
        window: Length of the sliding window, if the layer has one.
        softcap: c of c * tanh(score / c), or None.
        sinks: (H,), logits that take weight and give no value, or None.
        position_bias: Added to the scores, or None.
        dropout: Probability with which weights are dropped.
        both_ways: Whether queries see later keys.
        module: The layer's attention.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    position_bias: Tensor | None = None
    dropout: float = 0.0
    both_ways: bool = False
    module: nn.Module | None = None

    @property
    def bias(self) -> Tensor | None:
        """Mask and position bias as one term of the scores."""
        bias = self.mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=torch.float32).masked_fill_(~bias, float("-inf"))
        if self.position_bias is None:
            return bias
        # The kernels round it so.
        position_bias = self.position_bias.to(self.query.dtype)
        return position_bias if bias is None else bias + position_bias


class Hook:
    """Something that happens in one pass, at modules or in the attention of layers. Override what is needed.

    Attributes:
        modules: Modules whose input or output the hook reads or replaces.
        layers: Indices of the layers in whose attention it acts; None for all.
    """

    modules: Sequence[nn.Module] = ()
    layers: Collection[int] | None = ()

    def before(self, module: nn.Module, states: Tensor) -> Tensor:
        """Return the input of a module, (B, N, D)."""
        return states

    def after(self, module: nn.Module, states: Tensor) -> Tensor:
        """Return the output of a module, (B, N, D)."""
        return states

    def before_attention(self, call: AttentionCall) -> None:
        """Change what a layer's attention is computed of, such as ``call.mask``."""

    def after_attention(self, call: AttentionCall, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (B, H, N, d) and the log-sum-exp (B, H, N) of a layer's attention."""
        return output, lse

    @property
    def reads_weights(self) -> bool:
        """Whether attention must compute its log-sum-exp for this hook."""
        return type(self).after_attention is not Hook.after_attention


@dataclass(eq=False)
class Replace(Hook):
    """Replace the input or output of modules.

    Attributes:
        modules: The modules.
        inputs: Returns the new input of a module, given its input.
        outputs: Returns the new output of a module, given its output.
    """

    modules: Sequence[nn.Module] = field()
    inputs: Callable[[Tensor], Tensor] | None = None
    outputs: Callable[[Tensor], Tensor] | None = None

    def before(self, module: nn.Module, states: Tensor) -> Tensor:
        return states if self.inputs is None else self.inputs(states)

    def after(self, module: nn.Module, states: Tensor) -> Tensor:
        return states if self.outputs is None else self.outputs(states)


@dataclass(eq=False)
class Capture(Hook):
    """Keep the input or output of modules, on their devices.

    Attributes:
        modules: The modules, in the order in which their states are wanted.
        side: ``"before"`` for inputs, ``"after"`` for outputs.
        positions: (B,), the one position of each row that is kept; None for all.
        stops: Whether the pass ends when all of them have been seen.
    """

    modules: Sequence[nn.Module] = field()
    side: Side = "after"
    positions: Tensor | None = None
    stops: bool = False
    _seen: dict[int, Tensor] = field(default_factory=dict, init=False)

    @property
    def states(self) -> list[Tensor]:
        """States of each module, (B, N, D), or (B, D) at one position."""
        return [self._seen[id(module)] for module in self.modules]

    def before(self, module: nn.Module, states: Tensor) -> Tensor:
        return self._keep(module, states) if self.side == "before" else states

    def after(self, module: nn.Module, states: Tensor) -> Tensor:
        return self._keep(module, states) if self.side == "after" else states

    def _keep(self, module: nn.Module, states: Tensor) -> Tensor:
        self._seen[id(module)] = states if self.positions is None else gather_positions(states, self.positions)
        if self.stops and len(self._seen) == len(self.modules):
            raise Stop
        return states


class Stop(Exception):  # noqa: N818 - nothing went wrong
    """Raised by a hook that has all it wants: the rest of the model does not run."""


_active: ContextVar[tuple[Hook, ...]] = ContextVar("st_reba_hooks", default=())
_lock = threading.Lock()


@contextlib.contextmanager
def active_pass(hooks: Sequence[Hook]) -> Iterator[None]:
    """Let hooks act on what runs within the block, in this thread, in their order. Those of a pass around it do not."""
    for hook in hooks:
        for module in hook.modules:
            _listen(module)
    token = _active.set(tuple(hooks))
    try:
        yield
    finally:
        _active.reset(token)


def keep_hooks_for_checkpointing(model: nn.Module) -> None:
    """Let the hooks of a pass act again when gradient checkpointing runs a layer a second time, after the pass.

    Raises:
        RuntimeError: If no module of the model has transformers' function for that.
    """
    found = [module for module in model.modules() if hasattr(module, _CHECKPOINT)]
    if not found:
        raise RuntimeError(
            f"{type(model).__name__} has no {_CHECKPOINT}, so its masks cannot be kept for the second run of a layer. "
            "Train it without gradient checkpointing, with smaller batches."
        )
    for module in found:
        checkpoint = partial(getattr(module, _CHECKPOINT), use_reentrant=False, context_fn=_both_runs)
        setattr(module, _CHECKPOINT, checkpoint)


def _both_runs() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return the contexts of a layer's first run, in which hooks are active, and of its second run."""
    return contextlib.nullcontext(), active_pass(_active.get())


def hooks_at_module(module: nn.Module) -> list[Hook]:
    """Return the hooks of a module in the active pass."""
    return [hook for hook in _active.get() if any(module is watched for watched in hook.modules)]


def hooks_at_attention(attention: nn.Module) -> list[Hook]:
    """Return the hooks of a layer's attention in the active pass."""
    layer = getattr(attention, "layer_idx", None)
    return [hook for hook in _active.get() if hook.layers is None or layer in hook.layers]


def _listen(module: nn.Module) -> None:
    """Let a module ask for its hooks; once, so that no thread changes the dictionary that another iterates."""
    with _lock:
        if _before not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_before, with_kwargs=True)
            module.register_forward_hook(_after)


# torch.compile would freeze the hooks of the pass in which a graph was traced.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hooks = hooks_at_module(module)
    if not hooks:
        return None
    name = None if args else next(iter(kwargs))
    states = args[0] if name is None else kwargs[name]
    for hook in hooks:
        states = hook.before(module, states)
    return ((states, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: states})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    hooks = hooks_at_module(module)
    if not hooks:
        return None
    # Layers of some architectures return a tuple that begins with the states.
    states = output[0] if isinstance(output, tuple) else output
    for hook in hooks:
        states = hook.after(module, states)
    return (states, *output[1:]) if isinstance(output, tuple) else states


def gather_positions(states: Tensor, positions: Tensor) -> Tensor:
    """Return the state at one position of each row: (B, N, D) and (B,) to (B, D)."""
    return states[torch.arange(len(states), device=states.device), positions.to(states.device)]


def scatter_positions(states: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """Return states (B, N, D) with ``values`` (B, D) at one position of each row, (B,)."""
    index = (torch.arange(len(states), device=states.device), positions.to(states.device))
    return states.index_put(index, values.to(states.device, states.dtype))
