"""The one door to a language model: a pass, what is changed in it, who looks on, and which states are wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .all_layers import beside
from .attention.changes import Masking, Rerouting
from .attention.observers import Observer
from .backbone import is_checkpointing
from .checkpointing import remember_contexts
from .context import current, entered
from .hooks import Hook, hooked
from .states import StatesAt


@dataclass(frozen=True)
class Effect:
    """What is changed in one pass.

    Attributes:
        masking: Replaces masks.
        rerouting: Puts one token's key and value before all others.
        hooks: What happens at single modules.
    """

    masking: Masking | None = None
    rerouting: Rerouting | None = None
    hooks: Mapping[nn.Module, Hook] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether anything is changed."""
        return self.masking is not None or self.rerouting is not None or bool(self.hooks)

    @property
    def can_be_repeated(self) -> bool:
        """Whether a layer that runs a second time, for its gradient, computes the same.

        What attention looks up, it looks up again; a hook may have been meant for one time.
        """
        return not self.hooks


@contextlib.contextmanager
def changed(effects: Iterable[Effect]) -> Iterator[None]:
    """In this block, in this thread, let all of these hold; at most one replaces masks, and one re-routes."""
    effects = list(effects)
    parts: dict[str, Any] = {}
    for effect in effects:
        own = {"masking": effect.masking, "rerouting": effect.rerouting}
        given = {name: part for name, part in own.items() if part is not None}
        assert not given.keys() & parts.keys(), "what cannot be combined is refused when a module is made"
        parts |= given
    with entered(**parts), contextlib.ExitStack() as stack:
        for effect in effects:
            stack.enter_context(hooked(effect.hooks))
        yield


def run(
    model: PreTrainedModel,
    forward: Callable[[], Tensor],
    *,
    show_maps: Callable[[Observer], Tensor] | None = None,
    change: Sequence[Effect] = (),
    observe: Observer | StatesAt | None = None,
    reader: str,
) -> Tensor:
    """Run a language model once.

    Args:
        model: The model, which ends at the layer that is wanted.
        forward: Runs it: its last hidden states, (B, N, D).
        show_maps: The same where the architecture hands out its attention maps itself: shows them to the observer.
            None: its attention calls our function, which does.
        change: What is changed in this pass: see :func:`changed`.
        observe: Who looks on. It sees what is changed as it is then.
        reader: Who asks, for the refusal.

    Returns:
        (B, N, D), what ``forward`` gives, with the states of all layers side by side where they are recorded.

    Raises:
        ValueError: If the model is being trained with gradient checkpointing, and states are changed, looked at or
            recorded, or attention is looked at.
        Halt: If the observer has seen all it wants.
    """
    recorded = current().record is not None
    checkpointing = is_checkpointing(model)
    repeated = all(effect.can_be_repeated for effect in change)
    if checkpointing and (not repeated or observe is not None or recorded):
        asked = " with output_hidden_states=True" if recorded else ""
        raise ValueError(
            "Gradient checkpointing runs each layer a second time, when nothing is watched or recorded and no state is "
            f"changed. Turn it off to train through {reader}{asked}."
        )
    if checkpointing and change:
        remember_contexts(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(changed(change))
        if isinstance(observe, StatesAt):
            stack.enter_context(hooked(observe.hooks()))
        elif observe is not None and show_maps is None:
            stack.enter_context(entered(observer=observe))
        if show_maps is None or observe is None or isinstance(observe, StatesAt):
            return beside(forward())
        return beside(show_maps(observe))
