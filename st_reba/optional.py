"""Import of optional packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def require(name: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional package.

    Args:
        name: Name of the module, such as ``"matplotlib.figure"``.
        extra: Extra of st_reba that installs the package.
        purpose: Feature that needs the package, as the beginning of the message.

    Raises:
        ImportError: If the package is not installed, or cannot be imported.
    """
    package, install = name.partition(".")[0], f'pip install "st-reba[{extra}]"'
    try:
        return import_module(name)
    # A broken package may raise any error.
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise ImportError(f"{purpose} needs {package}: {install}.") from None
        problem = f"{purpose} needs {package}, which is installed and cannot be imported ({error!r}):"
        raise ImportError(f"{problem} {install} --force-reinstall.") from error
