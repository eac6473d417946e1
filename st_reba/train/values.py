"""Whether a value is of the type that an annotation says, and what to say where it is not."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "names with values, {name: value}",
    list: "a list",
    type(None): "null",
}


def hints_of(kind: type) -> dict[str, Any]:
    """The types of a class's attributes."""
    return get_type_hints(kind)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, to the letter: ``True`` is no whole number; but a whole number is a number."""
    options = _options(hint)
    enums = [option for option in options if _is_enum(option)]
    if enums and isinstance(value, str) and not isinstance(value, Enum):
        # Beside its name stands ``str``, for what the names are.
        return any(value in {member.value for member in option} for option in enums)
    if len(options) > 1:
        return any(fits(value, option) for option in options)
    origin = get_origin(hint) or hint
    if origin is Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, get_args(hint)[0]) for item in value)
    if hint is Any:
        return True
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    if hint in (str, int, bool):
        return type(value) is hint
    if origin is Callable:
        return callable(value)
    return isinstance(value, origin)


def in_range(value: Any, limits: Mapping[str, Any]) -> bool:
    """Whether a number is within limits: ``least``, ``above``, ``below``."""
    if type(value) not in (int, float):
        return True
    least, above, below = (limits.get(name) for name in ("least", "above", "below"))
    return (least is None or value >= least) and (above is None or value > above) and (below is None or value < below)


def converted(value: Any, hint: Any) -> Any:
    """What was meant in YAML 1.1: a list as a tuple, ``2e-4``, which it takes for text, and ``no`` for a word."""
    options = _options(hint)
    if isinstance(value, list) and any(get_origin(option) is tuple for option in options):
        return tuple(value)
    if isinstance(value, str) and float in options and str not in options:
        try:
            return float(value)
        except ValueError:
            return value
    if value is False and bool not in options and any(_is_enum(option) for option in options):
        return "no"
    return value


def described(hint: Any, limits: Mapping[str, Any]) -> str:
    """What a value may be."""
    options = _options(hint)
    if any(_is_enum(option) for option in options):
        options = tuple(option for option in options if option is not str and get_origin(option) is not Callable)
    named = " or ".join(dict.fromkeys(_named(option) for option in options))
    words = {"least": "at least {:g}", "above": "above {:g}", "below": "below {:g}"}
    ranges = [words[name].format(limits[name]) for name in words if limits.get(name) is not None]
    return ", ".join([named, *ranges])


def nearest(given: str, known: Iterable[str]) -> str:
    """The name that was likely meant, in a sentence with a blank before it; nothing where none is near."""
    found = difflib.get_close_matches(given, list(known), n=1, cutoff=0.6)
    return f" The nearest is {found[0]}." if found else ""


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _named(hint: Any) -> str:
    origin = get_origin(hint) or hint
    if origin is Literal:
        return " or ".join(f'"{allowed}"' if isinstance(allowed, str) else str(allowed) for allowed in get_args(hint))
    if _is_enum(hint):
        return " or ".join(f'"{member.value}"' for member in hint)
    if origin is tuple:
        return f"a list, each {described(get_args(hint)[0], {})}"
    return _NAMES.get(origin) or str(getattr(hint, "__name__", hint))
