"""The former name of :mod:`st_reba.reading.layers`."""

import warnings

from ..reading.layers import LayerReader  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.reading.layers: import from there.", DeprecationWarning, stacklevel=2)
