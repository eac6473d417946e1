"""What a training is asked for: dataclasses that check their values, and the YAML files that they are read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import yaml

from .values import converted, described, fits, hints_of, in_range, nearest

S = TypeVar("S", bound="Settings")


def setting(
    default: Any = MISSING,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    may_change: bool = False,
) -> Any:
    """A field of :class:`Settings` with a range.

    Args:
        default: Its value where none is given; without a default it must be given.
        least: The lowest number that is allowed.
        above: A number that it must exceed.
        below: A number that it must not reach.
        may_change: Whether a run that was interrupted may go on with another value: true of what decides when something
            is written or evaluated, and of where data lie, of which the content counts.
    """
    return field(default=default, metadata={"least": least, "above": above, "below": below, "may_change": may_change})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the frozen dataclasses that name what a training may be asked for.

    A field is a ``str``, ``int``, ``float``, ``bool``, a ``Literal``, a ``tuple[T, ...]`` of those, a ``dict``, or a
    union of them; :func:`setting` gives it a range.

    Raises:
        ValueError: If a value has another type or is out of range, naming the field, what was given and what is
            allowed.
    """

    #: Values that belong together, by the name that the key ``preset`` of a file has for them.
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: Keys that are taken still, and named to nobody any more.
    FORMER_KEYS: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        hints = hints_of(type(self))
        for known in fields(self):
            value = getattr(self, known.name)
            if not fits(value, hints[known.name]) or not in_range(value, known.metadata):
                allowed = described(hints[known.name], known.metadata)
                raise ValueError(f"{known.name}: {value!r} was given, but it must be {allowed}.")

    @classmethod
    def of_preset(cls, name: str, /, **given: Any) -> Self:
        """The settings of a preset, with others in place of some of them or besides.

        Raises:
            ValueError: If there is no such preset, or as the class itself.
        """
        return cls(**cls._with_preset(name, given))

    @classmethod
    def _with_preset(cls, name: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        if name not in cls.PRESETS:
            raise ValueError(
                f"preset: {name!r} was given, but it must be {' or '.join(map(repr, cls.PRESETS))}, or left out."
            )
        chosen = {**cls.PRESETS[name], **given}
        for key, value in cls.PRESETS[name].items():
            if isinstance(value, Mapping) and isinstance(given.get(key), Mapping):
                chosen[key] = {**value, **given[key]}
        return chosen

    @classmethod
    def instead_of(cls, key: str, known: list[str]) -> str:
        """Which key to use instead of one that is unknown, in a sentence."""
        return f"Keys: {', '.join(known)}.{nearest(key, known)}"


def read_settings(path: str | Path, kind: type[S]) -> S:
    """Read a YAML file of ``key: value`` lines.

    Args:
        path: The file, UTF-8.
        kind: The dataclass that names the keys.

    Raises:
        ValueError: If the file is not such a list, or a key is unknown or missing, or a value is not what it may be:
            naming the file, the key, what was given and what is allowed.
        FileNotFoundError: If there is no such file.
    """
    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{path}{line}: this is not YAML ({error.problem}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this is not YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(given, dict):
        held = "nothing" if given is None else f"a {type(given).__name__}"
        keys = ", ".join(_known(kind))
        raise ValueError(f"{path} holds {held}, but it must hold lines such as model: org/name. Keys: {keys}.")
    try:
        return _made(kind, given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _made(kind: type[S], given: Mapping[str, Any]) -> S:
    known, hints = {found.name: found for found in fields(kind)}, hints_of(kind)
    if kind.PRESETS and "preset" in given:
        given = kind._with_preset(given["preset"], {key: value for key, value in given.items() if key != "preset"})
    if unknown := [key for key in given if key not in known]:
        raise ValueError(f"the key {unknown[0]!r} is unknown. {kind.instead_of(str(unknown[0]), _known(kind))}")
    needed = [name for name, found in known.items() if found.default is MISSING and found.default_factory is MISSING]
    if missing := [name for name in needed if name not in given]:
        value = described(hints[missing[0]], {})
        raise ValueError(f"the key {missing[0]!r} is missing. Add a line {missing[0]}: VALUE; it is {value}.")
    return kind(**{key: converted(value, hints[key]) for key, value in given.items()})


def _known(kind: type[Settings]) -> list[str]:
    """The keys that a file may have, but those that it should not have any more."""
    names = [found.name for found in fields(kind) if found.name not in kind.FORMER_KEYS]
    return [*names, "preset"] if kind.PRESETS else names
