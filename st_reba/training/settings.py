"""What a training is asked for: dataclasses that check their values, and the YAML files that they are read from."""

from __future__ import annotations

import math
import types
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

S = TypeVar("S", bound="Settings")

_NAMES: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


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

    A field is a ``str``, ``int``, ``float``, ``bool``, a ``Literal``, a ``tuple[T, ...]`` of those, or a union of them;
    :func:`setting` gives it a range.

    Raises:
        ValueError: If a value has another type or is out of range, naming the field, what was given and what is
            allowed.
    """

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for known in fields(self):
            value = getattr(self, known.name)
            if not _fits(value, hints[known.name]) or not _in_range(value, known.metadata):
                allowed = _described(hints[known.name], known.metadata)
                raise ValueError(f"{known.name}: {value!r} was given, but it must be {allowed}.")


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """What every run of the trainer is asked for; see :func:`st_reba.training.fit`."""

    epochs: int = setting(1, least=1)
    max_steps: int = setting(-1, least=-1)
    batch_size: int = setting(32, least=1)
    learning_rate: float = setting(2e-5, above=0)
    warmup_ratio: float = setting(0.0, least=0, below=1)
    weight_decay: float = setting(0.0, least=0)
    checkpoint_steps: int | None = setting(None, least=1, may_change=True)
    evaluation_steps: int | None = setting(None, least=1, may_change=True)
    seed: int = setting(42, least=0)

    def identity(self) -> dict[str, Any]:
        """The settings that a run which goes on must share with the run that was interrupted."""
        return {known.name: getattr(self, known.name) for known in fields(self) if not known.metadata.get("may_change")}


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
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    known = {found.name: found for found in fields(kind)}
    if not isinstance(given, dict):
        held = "nothing" if given is None else f"a {type(given).__name__}"
        raise ValueError(f"{path} holds {held}, but it must hold lines such as seed: 42. Keys: {', '.join(known)}.")
    if unknown := [key for key in given if key not in known]:
        raise ValueError(f"{path}: the key {unknown[0]!r} is unknown. Keys: {', '.join(known)}.")
    needed = [name for name, found in known.items() if found.default is MISSING and found.default_factory is MISSING]
    hints = _hints(kind)
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"{path}: the key {missing[0]!r} is missing. Add it: {_described(hints[missing[0]], {})}.")
    try:
        return kind(**{key: _converted(value, hints[key]) for key, value in given.items()})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _hints(kind: type[Settings]) -> dict[str, Any]:
    return get_type_hints(kind)


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    options = _options(hint)
    if len(options) > 1:
        return any(_fits(value, option) for option in options)
    if get_origin(hint) is Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _in_range(value: Any, limits: Any) -> bool:
    if type(value) not in (int, float):
        return True
    least, above, below = (limits.get(name) for name in ("least", "above", "below"))
    return (least is None or value >= least) and (above is None or value > above) and (below is None or value < below)


def _converted(value: Any, hint: Any) -> Any:
    """YAML's lists as tuples, and the numbers that YAML 1.1 takes for text (``2e-4``)."""
    options = _options(hint)
    if isinstance(value, list) and any(get_origin(option) is tuple for option in options):
        return tuple(value)
    if isinstance(value, str) and float in options and str not in options:
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _described(hint: Any, limits: Any) -> str:
    named = " or ".join(_named(option) for option in _options(hint))
    words = {"least": "at least {:g}", "above": "above {:g}", "below": "below {:g}"}
    ranges = [words[name].format(limits[name]) for name in words if limits.get(name) is not None]
    return ", ".join([named, *ranges])


def _named(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(f'"{allowed}"' if isinstance(allowed, str) else str(allowed) for allowed in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list, each {_described(get_args(hint)[0], {})}"
    return _NAMES.get(hint, str(hint))
