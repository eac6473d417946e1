"""The former name of :mod:`st_reba.train`."""

import warnings
from typing import Any

from . import train

warnings.warn(f"{__name__} is now st_reba.train: import from there.", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    return getattr(train, name)
