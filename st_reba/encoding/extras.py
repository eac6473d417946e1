"""Packages that only some jobs need, with a sentence where they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def require_pyarrow(purpose: str) -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        ImportError: If they are not installed, saying what for and how to install them.
    """
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError(f'{purpose} needs pyarrow: pip install "st-reba[parquet]".') from None


def require_ray() -> Any:
    """``ray``, with ``ray.data``.

    Raises:
        ImportError: If it is not installed, saying how to install it.
    """
    try:
        import_module("ray.data")
        return import_module("ray")
    except ImportError:
        raise ImportError('The ray engine needs Ray Data: pip install "st-reba[ray]".') from None
