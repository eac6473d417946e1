"""Which type a kept column has: found from all of its values, so that each is written as what it is."""

from __future__ import annotations

import json
import math
from typing import Any

from ..optional import require_pyarrow

#: How deep lists and objects may stand in each other; Parquet readers stop at about twice that.
MAX_DEPTH = 40
#: How many different keys the objects at one place may have: each becomes a column of its own.
MAX_KEYS = 1000

#: Whole numbers up to here are exact as decimals (64-bit floats).
_EXACT = 2**53
_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
_TEXT = "Write it as a string, or do not keep the column."


class NotANumber(float):
    """NaN, Infinity and -Infinity that stand as such in a line; what is merely too large for a float is none."""


class Place:
    """The one type that holds every value at a place: a column, a key of its objects, or the items of its lists.

    Whole numbers beside decimals become decimals, objects get every key that one of them has (null where it lacks), and
    null goes with anything. Nothing else is converted, and no value changes: what would is refused as it comes.

    Args:
        name: What the place is called in refusals.
        depth: How many lists and objects it stands in.
    """

    def __init__(self, name: str, depth: int = 0) -> None:
        self.name = name
        self._depth = depth
        self._kind = ""
        self._line: int | str = 0
        self._least = self._most = 0
        #: Lines of the first decimal, and of the first whole number that no decimal equals.
        self._decimal: int | str = 0
        self._long: int | str = 0
        self._keys: dict[str, Place] = {}
        self._items: Place | None = None

    def add(self, value: Any, line: int | str) -> None:
        """Take in a value, as JSON gives it.

        Raises:
            ValueError: If no type holds it and those before it, or it is none that can be written.
        """
        if value is None:
            return
        kind = _KINDS.get(type(value), "a number")
        if not self._kind:
            self._kind, self._line = kind, line
        elif kind != self._kind:
            raise ValueError(f"{self.name} is {kind}, but {self._kind} in line {self._line}. {_TEXT}")
        if isinstance(value, str):
            check_characters(value, self.name)
        elif isinstance(value, dict):
            self._add_object(value, line)
        elif isinstance(value, list):
            self._items = self._items or self._inside(f"an item of {self.name}")
            for item in value:
                self._items.add(item, line)
        elif isinstance(value, float):
            self._add_decimal(value, line)
        elif not isinstance(value, bool):
            self._add_whole(value, line)

    def arrow_type(self) -> Any:
        """The Arrow type of what was added; null if nothing was."""
        arrow, _ = require_pyarrow("Keeping columns")
        if self._items is not None:
            return arrow.list_(self._items.arrow_type())
        if self._keys:
            return arrow.struct([(name, place.arrow_type()) for name, place in self._keys.items()])
        if self._kind == "an object":
            raise ValueError(f"{self.name} has objects without keys alone, which Parquet cannot hold: do not keep it.")
        if self._kind == "a number":
            whole = arrow.uint64() if self._most >= 2**63 else arrow.int64()
            return arrow.float64() if self._decimal else whole
        return {"a string": arrow.string(), "true or false": arrow.bool_(), "": arrow.null()}[self._kind]

    def _inside(self, name: str) -> Place:
        if self._depth == MAX_DEPTH:
            raise ValueError(f"a kept column has lists and objects in each other, more than {MAX_DEPTH} deep. {_TEXT}")
        return Place(name, self._depth + 1)

    def _add_object(self, value: dict[str, Any], line: int | str) -> None:
        for key, item in value.items():
            if key not in self._keys:
                check_characters(key, f"a key in {self.name}")
                if len(self._keys) == MAX_KEYS:
                    raise ValueError(f"{self.name} has objects with more than {MAX_KEYS} different keys. {_TEXT}")
                self._keys[key] = self._inside(f"{json.dumps(key)} in {self.name}")
            self._keys[key].add(item, line)

    def _add_decimal(self, value: float, line: int | str) -> None:
        if math.isinf(value) and not isinstance(value, NotANumber):
            raise ValueError(f"{self.name} is a number beyond the range of a 64-bit float. {_TEXT}")
        if self._long:
            raise ValueError(
                f"{self.name} is a decimal, but a whole number of more than 53 bits in line {self._long}, which would "
                f"lose digits as a decimal. {_TEXT}"
            )
        self._decimal = self._decimal or line

    def _add_whole(self, value: int, line: int | str) -> None:
        if value < self._least:
            self._least = value
        elif value > self._most:
            self._most = value
        if self._least < -(2**63) or self._most >= (2**63 if self._least < 0 else 2**64):
            raise ValueError(f"{self.name} has integers that do not fit in 64 bits. {_TEXT}")
        if abs(value) > _EXACT:
            if self._decimal:
                raise ValueError(
                    f"{self.name} is a whole number of more than 53 bits, which would lose digits as a decimal, such "
                    f"as line {self._decimal} has. {_TEXT}"
                )
            self._long = self._long or line


def check_characters(text: str, name: str) -> None:
    """Refuse what is no text.

    Raises:
        ValueError: If there is half of a surrogate pair in it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half of a surrogate pair, which is no character.") from None
