"""A setting is declared once: its name, what it may be, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")

#: Where tokenizers and sentence-transformers keep "no limit".
NO_LIMIT = int(1e30)


@dataclass(frozen=True)
class Setting(Generic[_Value]):
    """What a setting may be.

    Attributes:
        name: As it is passed and saved.
        allowed: Whether a value may stand; any value is given, of any type.
        says: What is allowed and what to do, as the end of a refusal.
    """

    name: str
    allowed: Callable[[Any], bool]
    says: str

    def check(self, value: _Value) -> _Value:
        """The value.

        Raises:
            ValueError: If it may not stand.
        """
        if not self.allowed(value):
            raise ValueError(f"{self.name}={value!r}: {self.says}")
        return value


def whole(name: str, least: int, most: int | None = None, says: str = "") -> Setting[int]:
    """A whole number in a range."""
    return Setting(
        name,
        lambda value: type(value) is int and least <= value and (most is None or value <= most),
        says or f"give a whole number from {least} to {most}.",
    )


def flag(name: str) -> Setting[bool]:
    """True or False."""
    return Setting(name, lambda value: isinstance(value, bool), "use True or False.")


def choice(name: str, *values: str, says: str = "") -> Setting[Any]:
    """One of some strings."""
    listed = ", ".join(f'"{value}"' for value in values[:-1])
    return Setting(
        name, lambda value: isinstance(value, str) and value in values, says or f'use {listed} or "{values[-1]}".'
    )


def tokens(name: str) -> Setting[int | None]:
    """A number of tokens; None, or transformers' huge one: no limit."""
    return Setting(
        name,
        lambda value: (
            value is None or (type(value) is int and value >= 1) or (isinstance(value, float) and value >= NO_LIMIT)
        ),
        "give a number of tokens, 1 or more, or None for no limit.",
    )


def layers_or_all(name: str) -> Setting[Any]:
    """All layers, or a list of their indices; whether the model has these is not asked here."""
    return Setting(
        name,
        lambda value: (
            value == "all"
            or (isinstance(value, (list, tuple)) and len(value) > 0 and all(type(layer) is int for layer in value))
        ),
        'use "all" or a list of layer indices, such as [-1].',
    )


def optional(setting: Setting[_Value]) -> Setting[_Value | None]:
    """The same, or None."""
    return Setting(setting.name, lambda value: value is None or setting.allowed(value), setting.says)


def described(module: object, names: Iterable[str]) -> str:
    """What a module has of these settings, as its ``extra_repr``: ``repetitions=2, rows='all'``."""
    return ", ".join(f"{name}={getattr(module, name)!r}" for name in names)
