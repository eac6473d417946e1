"""Checks of constructor arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

#: Indices of layers, negative ones from the top; or all layers.
Layers: TypeAlias = Literal["all"] | Sequence[int]
#: Value that transformers and sentence-transformers use for no limit.
NO_LIMIT = int(1e30)


def check(name: str, value: Any, is_allowed: bool, advice: str) -> Any:
    """Return a value that is allowed.

    Args:
        name: Name of the argument.
        value: Value that was given.
        is_allowed: Whether it may be used.
        advice: End of the error message: what is allowed, and what to do.

    Raises:
        ValueError: If it is not allowed.
    """
    if not is_allowed:
        raise ValueError(f"{name}={value!r}: {advice}")
    return value


def check_choice(name: str, value: Any, *allowed: str) -> Any:
    """Return a value that must be one of some strings."""
    return check(name, value, value in allowed, f"use {' or '.join(map(repr, allowed))}.")


def check_flag(name: str, value: Any) -> bool:
    """Return a value that must be True or False."""
    return bool(check(name, value, isinstance(value, bool), "use True or False."))


def check_int(name: str, value: Any, least: int, most: int | None = None, advice: str = "") -> int:
    """Return a value that must be an integer within bounds."""
    is_allowed = type(value) is int and least <= value and (most is None or value <= most)
    bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
    return int(check(name, value, is_allowed, advice or f"give a whole number {bounds}."))


def check_layers(name: str, value: Any) -> Any:
    """Return a list of layer indices, or "all". The model may not have these layers."""
    is_list = isinstance(value, (list, tuple, range)) and len(value) > 0
    are_indices = is_list and all(type(layer) is int for layer in value)
    advice = 'use "all" or a list of layer indices, such as [-1].'
    return check(name, value, are_indices or value == "all", advice)


def check_tokens(name: str, value: Any) -> int | None:
    """Return a number of tokens, or None for no limit."""
    is_limit = type(value) is int and value >= 1
    is_no_limit = value is None or (isinstance(value, float) and value >= NO_LIMIT)
    check(name, value, is_limit or is_no_limit, "give a number of tokens, 1 or more, or None for no limit.")
    return value if is_limit else None


def first_not_none(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def describe(module: object, names: Iterable[str]) -> str:
    """Return settings of a module as text for its ``extra_repr``, such as ``repetitions=2, rows='all'``."""
    return ", ".join(f"{name}={getattr(module, name)!r}" for name in names)
