"""Old name of :mod:`st_reba.lm.run`, for one release."""

import warnings

from .run import StatesAt, at, put

__all__ = ["StatesAt", "at", "put"]

warnings.warn(f"{__name__} is now st_reba.lm.run: import from there.", DeprecationWarning, stacklevel=2)
