"""The former name of :mod:`st_reba.modules.reba`."""

import warnings

from ..reba import ReBAModule  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.reba: import from there.", DeprecationWarning, stacklevel=2)
