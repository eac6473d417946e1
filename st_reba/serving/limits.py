"""The former name of :mod:`st_reba.serve.batches`."""

import warnings
from typing import Any

from ..serve import batches

warnings.warn(f"{__name__} is now st_reba.serve.batches: import from there.", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    return getattr(batches, name)
