"""Settings: their names, their allowed values, and the messages for other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")

#: Value of tokenizers and sentence-transformers for "no limit".
NO_LIMIT = int(1e30)


@dataclass(frozen=True)
class Setting(Generic[_Value]):
    """Declaration of a setting.

    Attributes:
        name: Name of the argument, which is also saved.
        allowed: Function that returns whether a value of any type is allowed.
        says: Allowed values and remedy, as the end of an error message.
    """

    name: str
    allowed: Callable[[Any], bool]
    says: str

    def check(self, value: _Value) -> _Value:
        """Return the value if it is allowed.

        Raises:
            ValueError: If the value is not allowed.
        """
        if not self.allowed(value):
            raise ValueError(f"{self.name}={value!r}: {self.says}")
        return value


def whole(name: str, least: int, most: int | None = None, says: str = "") -> Setting[int]:
    """Return a setting for whole numbers in a range."""
    return Setting(
        name,
        lambda value: type(value) is int and least <= value and (most is None or value <= most),
        says or f"give a whole number from {least} to {most}.",
    )


def flag(name: str) -> Setting[bool]:
    """Return a setting for True or False."""
    return Setting(name, lambda value: isinstance(value, bool), "use True or False.")


def choice(name: str, *values: str, says: str = "") -> Setting[Any]:
    """Return a setting for one of several strings."""
    listed = ", ".join(f'"{value}"' for value in values[:-1])
    return Setting(
        name, lambda value: isinstance(value, str) and value in values, says or f'use {listed} or "{values[-1]}".'
    )


def tokens(name: str) -> Setting[int | None]:
    """Return a setting for a number of tokens, in which None or transformers' huge number means no limit."""
    return Setting(
        name,
        lambda value: (
            value is None or (type(value) is int and value >= 1) or (isinstance(value, float) and value >= NO_LIMIT)
        ),
        "give a number of tokens, 1 or more, or None for no limit.",
    )


def layers_or_all(name: str) -> Setting[Any]:
    """Return a setting for all layers or a list of indices, which are not checked against a model."""
    return Setting(
        name,
        lambda value: (
            value == "all"
            or (isinstance(value, (list, tuple)) and len(value) > 0 and all(type(layer) is int for layer in value))
        ),
        'use "all" or a list of layer indices, such as [-1].',
    )


def optional(setting: Setting[_Value]) -> Setting[_Value | None]:
    """Return the setting with None as another allowed value."""
    return Setting(setting.name, lambda value: value is None or setting.allowed(value), setting.says)


def described(module: object, names: Iterable[str]) -> str:
    """Return a module's settings for ``extra_repr``, such as ``repetitions=2, rows='all'``."""
    return ", ".join(f"{name}={getattr(module, name)!r}" for name in names)
