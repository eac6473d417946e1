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
    package = name.partition(".")[0]
    install = f'pip install "st-reba[{extra}]"'
    try:
        import_module(package)
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise ImportError(f"{purpose} needs {package}: {install}.") from None
        cause: Exception = error
    # A broken package may raise any error.
    except Exception as error:
        cause = error
    reason = " ".join(str(cause).split()) or "no message"
    raise ImportError(
        f"{purpose} needs {package}, which is installed and cannot be imported ({type(cause).__name__}: {reason}). "
        f"Install it anew: {install}, with --force-reinstall if that changes nothing."
    ) from cause
