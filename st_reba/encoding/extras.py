"""Packages that only some jobs need, with a sentence where they are missing."""

from __future__ import annotations

from types import ModuleType


def require_pyarrow(purpose: str) -> tuple[ModuleType, ModuleType]:
    """``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        ImportError: If they are not installed, saying what for and how to install them.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f'{purpose} needs pyarrow: pip install "st-reba[parquet]".') from None
    return pyarrow, pyarrow.parquet


def require_ray() -> ModuleType:
    """``ray``, with ``ray.data``.

    Raises:
        ImportError: If it is not installed, saying how to install it.
    """
    try:
        import ray
        import ray.data
    except ImportError:
        raise ImportError('The ray engine needs Ray Data: pip install "st-reba[ray]".') from None
    return ray
