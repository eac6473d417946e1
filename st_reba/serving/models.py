"""The former name of :mod:`st_reba.serve.models`."""

import warnings
from typing import Any

from ..serve import models

warnings.warn(f"{__name__} is now st_reba.serve.models: import from there.", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    return getattr(models, name)
