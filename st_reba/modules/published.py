"""Under which name classes are known: that of the package, which saved models write, and not of the file they live in.

ST writes ``type(module).__module__`` into modules.json, and offers no other way to say it. Saved models outlive the
file that a class happens to live in, so every public class says that it is of ``st_reba.modules``. Only ``inspect``,
which would look for the source there in vain, is told the file.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABCMeta
from typing import Any

#: The package that saved models name: ``st_reba.modules.<Class>``.
PACKAGE = __name__.rpartition(".")[0]

#: The module that each published class is written in. A class derived from one is its author's to publish.
_written_in: dict[type, str] = {}


class Published(ABCMeta):
    """Classes whose source is found, although they name the package as their module."""

    def __getattribute__(cls, name: str) -> Any:
        if name == "__module__" and cls in _written_in and _inspect_asks():
            return _written_in[cls]
        return super().__getattribute__(name)


def publish(*classes: type) -> None:
    """Have these classes known by the package, where saved and pickled models look for them."""
    for published in classes:
        assert isinstance(published, Published), f"the source of {published.__name__} would not be found"
        _written_in[published] = published.__module__
        published.__module__ = PACKAGE
        setattr(sys.modules[PACKAGE], published.__name__, published)


def _inspect_asks() -> bool:
    """Whether it is a function of ``inspect`` that looks the attribute up."""
    frame = inspect.currentframe()
    asking = frame and frame.f_back and frame.f_back.f_back
    return asking is not None and asking.f_globals.get("__name__") == "inspect"
