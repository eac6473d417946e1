"""Under which name sentence-transformers writes a class into a saved model."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import Any

#: The package that saved models name: ``st_reba.modules.<Class>``.
PACKAGE = __name__.rpartition(".")[0]


class Published(ABCMeta):
    """Classes that saved models name by the package that offers them, not by the file that they live in.

    ST writes ``type(module).__module__`` into modules.json, and offers no other way to say it. Saved models outlive
    that file. Everybody else (``inspect``, ``pickle``, Sphinx, an editor) asks it for the file, and must be told that.
    So ST alone is told the package.
    """

    def __getattribute__(cls, name: str) -> Any:
        if name == "__module__" and cls in _published and _asked_by("sentence_transformers"):
            return PACKAGE
        return super().__getattribute__(name)


# A class derived from one of these is its author's to publish.
_published: set[type] = set()


def publish(*classes: type) -> None:
    """Have saved models name these classes by the package."""
    for published in classes:
        assert isinstance(published, Published), f"{published.__name__} has no say in what it is called"
        _published.add(published)


def reference(published: type) -> str:
    """What a saved model calls a class."""
    return f"{PACKAGE}.{published.__name__}"


def _asked_by(package: str) -> bool:
    """Whether a function of this package asked for the attribute that is being looked up."""
    frame = inspect.currentframe()
    asking = frame and frame.f_back and frame.f_back.f_back
    return asking is not None and str(asking.f_globals.get("__name__", "")).partition(".")[0] == package
