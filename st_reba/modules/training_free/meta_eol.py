"""The former name of :mod:`st_reba.modules.meta_eol`."""

import warnings

from ..meta_eol import MetaEOLModule  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.meta_eol: import from there.", DeprecationWarning, stacklevel=2)
