"""The former name of :mod:`st_reba.compare.mteb`."""

import warnings

from . import mteb_estimates  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.compare.mteb: import from there.", DeprecationWarning, stacklevel=2)
