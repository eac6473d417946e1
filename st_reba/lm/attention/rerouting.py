"""Old name of :mod:`st_reba.lm.attention.changes`, for one release."""

import warnings

from .changes import FirstKey as Rerouting

__all__ = ["Rerouting"]

warnings.warn(f"{__name__} is now st_reba.lm.attention.changes: import from there.", DeprecationWarning, stacklevel=2)
