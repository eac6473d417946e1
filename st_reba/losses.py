"""The former name of :mod:`st_reba.train.losses`."""

import warnings
from typing import Any

from .train import losses

warnings.warn(f"{__name__} is now st_reba.train.losses: import from there.", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    return getattr(losses, name)
