"""Old name of :mod:`st_reba.lm.run`, for one release."""

import warnings

from .run import Halt, Hook, hooked

__all__ = ["Halt", "Hook", "hooked"]

warnings.warn(f"{__name__} is now st_reba.lm.run: import from there.", DeprecationWarning, stacklevel=2)
