"""What a change is, under which key a saved model names it, and which go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...lm.run import PassChange, StatesAt
from ...text.layout import Layout
from ...text.templates import Template
from ..stored import check_magnitudes

_Kind = TypeVar("_Kind", bound="type[Change]")


@dataclass(frozen=True)
class Change:
    """Something that is done to a language model while it reads, beside what the method does.

    A subclass is a frozen dataclass whose fields are its settings, of values that JSON has; they are checked when it
    is made, as far as that can be done without a model. Where a module has an argument for a change of its own, the
    setting bears that name.
    """

    #: The name that a saved model knows it by.
    key: ClassVar[str]

    #: Whether the state of a token then depends on tokens that stand behind it.
    looks_ahead: ClassVar[bool] = True

    #: What a layer has one of, and this puts another in place of: the masks, or the key before all others.
    replaces: ClassVar[Literal["masks", "first key"] | None] = None

    def resolved(self, model: PreTrainedModel, whole_depth: int) -> Self:
        """The same with the settings that it has for this model, in place of None and negative numbers.

        Args:
            model: The model, which ends where an early exit says.
            whole_depth: The layers that it has without one.

        Raises:
            ValueError: If a setting is out of the model's range.
        """
        return self

    def laid_out(self, template: Template) -> Template:
        """The template of a text that is read with it."""
        return template

    @property
    def cost(self) -> str:
        """What it costs beside the method, in a sentence; empty: next to nothing."""
        return ""

    @property
    def companion(self) -> Template | None:
        """One more template, in which a text is read before the method reads it in its own; None: there is none."""
        return None

    def fitted(self, model: PreTrainedModel) -> Fitted:
        """It, as it was resolved for one model, on that model, which is set up for it.

        Raises:
            ValueError: If it cannot be done to this model.
        """
        return Fitted()

    def settings(self) -> dict[str, Any]:
        """As a saved model has it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"key": self.key, **{name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}}

    def __str__(self) -> str:
        """Its settings, as one would type them."""
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))


class Fitted(nn.Module):
    """A change on one model; its buffers are saved with the module, where ``FILE`` says under which name."""

    FILE: ClassVar[str | None] = None

    def effect(self, model: PreTrainedModel, layout: Layout) -> PassChange:
        """What it does in one pass over a layout of B texts, to the model that it was fitted to or to a copy of it.

        ``layout.beside`` has what was seen of the change's companion, if it has one.
        """
        return PassChange()

    def observer(self, model: PreTrainedModel, companion: Layout) -> StatesAt:
        """What looks on at one module when the change's companion is read, under all changes that have none."""
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        """Write its buffers, if it has any."""
        if self.FILE is not None:
            kept = {name: buffer.detach().cpu().contiguous() for name, buffer in self.named_buffers()}
            save_file(kept, str(directory / self.FILE), metadata={"format": "pt"})

    def load(self, find: Callable[[str], str | None], module: str) -> None:
        """Take its buffers from where they were saved, if they were.

        Args:
            find: From a file's name to its path, or None where the model has no such file.
            module: What reads them, for the refusal.

        Raises:
            ValueError: If they are not of this model.
        """
        path = None if self.FILE is None else find(self.FILE)
        if path is None:
            return
        found = load_file(path)
        for name, buffer in self.named_buffers():
            given = found.get(name)
            if given is None or given.shape != buffer.shape:
                what = "nothing" if given is None else f"a tensor of shape {tuple(given.shape)}"
                raise ValueError(
                    f'{path} has {what} under "{name}", and the model\'s input embeddings have {len(buffer)} values. '
                    "They are of two models; save the model again."
                )
            check_magnitudes({name: given}, module)
            self._take(name, given.to(buffer.device))

    def _take(self, name: str, values: Tensor) -> None:
        setattr(self, name, values)


_registered: dict[str, type[Change]] = {}


def register(kind: _Kind) -> _Kind:
    """Let saved models name a change: a decorator of its class.

    Raises:
        ValueError: If another change has its key.
    """
    known = _registered.setdefault(kind.key, kind)
    if known is not kind:
        raise ValueError(
            f"{kind.__name__} has the key {kind.key!r}, which is that of {known.__name__}: give it another."
        )
    return kind


def from_settings(settings: Mapping[str, Any]) -> Change:
    """A change as a saved model has it: see :meth:`Change.settings`.

    Raises:
        ValueError: If no change of its key is registered, or it has no such settings.
    """
    key = settings.get("key")
    kind = _registered.get(key) if isinstance(key, str) else None
    if kind is None:
        raise ValueError(
            f"changes: {key!r} is not the key of a change that is registered; these are {sorted(_registered)}. Import "
            "the package that it is from, which calls st_reba.modules.changes.register, before the model is loaded."
        )
    given = {name: value for name, value in settings.items() if name != "key"}
    if unknown := sorted(given.keys() - (known := {field.name for field in fields(kind)})):
        raise ValueError(f"changes: {key!r} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    return kind(**given)


def listed(changes: Sequence[Change | Mapping[str, Any]]) -> list[Change | Mapping[str, Any]]:
    """The changes that a module is given, as a list.

    Raises:
        ValueError: If they are none.
    """
    if isinstance(changes, (str, Mapping)) or not isinstance(changes, Sequence):
        raise ValueError(f"changes={changes!r}: give a list of changes, such as [Reroute()].")
    return list(changes)


def combined(
    reader: str,
    named: Iterable[Change],
    given: Sequence[Change | Mapping[str, Any]],
    unfit: Callable[[Change], str | None],
) -> tuple[Change, ...]:
    """The changes that a module makes, in no order of theirs: the one place where what does not go together is refused.

    Args:
        reader: The module's class.
        named: Those of its own arguments.
        given: Those of ``changes``; also as a saved model has them.
        unfit: Why the module does not take a change, in a sentence; None where it does.

    Raises:
        ValueError: If one is none, or not for this module, or there are two of a kind.
    """
    found: list[Change] = []
    for change in (*named, *listed(given)):
        change = from_settings(change) if isinstance(change, Mapping) else change
        if not isinstance(change, Change):
            raise ValueError(f"changes has {change!r}: give changes, such as AttendBothWays(), Reroute() or Prepend().")
        if reason := unfit(change):
            raise ValueError(reason)
        for other in found:
            if isinstance(change, type(other)) or isinstance(other, type(change)):
                raise ValueError(
                    f"{reader} is given the change {change.key!r} with {change}, and makes it already, with {other}. "
                    "Leave one of the two out."
                )
            if change.replaces is not None and change.replaces == other.replaces:
                raise ValueError(
                    f"{reader} is given the changes {other.key!r} and {change.key!r}: both replace the "
                    f"{change.replaces} of a layer, which has one. Leave one of the two out."
                )
        found.append(change)
    return tuple(sorted(found, key=lambda change: change.key))
