"""Packages that only some jobs need, with a sentence where they are missing or broken."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def require(name: str, extra: str, purpose: str) -> Any:
    """A module of an optional package.

    Args:
        name: Such as ``"matplotlib.figure"``.
        extra: The extra of this package that brings it.
        purpose: What needs it, as a sentence begins.

    Raises:
        ImportError: If it is not installed, saying what needs it and how to install it; or if it is installed and
            cannot be imported, saying why.
    """
    package = name.partition(".")[0]
    install = f'pip install "st-reba[{extra}]"'
    try:
        import_module(package)
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise ImportError(f"{purpose} needs {package}: {install}.") from None
        cause: Exception = error
    # A library that does not fit its other half, a file that is cut short: any error ends an import.
    except Exception as error:
        cause = error
    said = " ".join(str(cause).split()) or "no message"
    raise ImportError(
        f"{purpose} needs {package}, which is installed and cannot be imported ({type(cause).__name__}: {said}). "
        f"Install it anew: {install}, with --force-reinstall if that changes nothing."
    ) from cause
