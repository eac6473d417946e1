"""The former name of :mod:`st_reba.modules.bidirectional`."""

import warnings

from ..bidirectional import BidirectionalLastLayer  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.bidirectional: import from there.", DeprecationWarning, stacklevel=2)
