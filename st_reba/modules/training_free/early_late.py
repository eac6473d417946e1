"""The former name of :mod:`st_reba.modules.early_late`."""

import warnings

from ..early_late import EarlyLateModule  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.early_late: import from there.", DeprecationWarning, stacklevel=2)
