"""The former name of :mod:`st_reba.encode`."""

import warnings
from typing import Any

from . import encode

warnings.warn(f"{__name__} is now st_reba.encode: import from there.", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    return getattr(encode, name)
