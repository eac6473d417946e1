"""The former name of :mod:`st_reba.compare.sweep`."""

import warnings

from ..compare.sweep import RecipeSweep  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.compare.sweep: import from there.", DeprecationWarning, stacklevel=2)
