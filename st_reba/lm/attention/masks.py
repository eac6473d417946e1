"""Old name of :mod:`st_reba.lm.attention.changes`, for one release."""

import warnings

from .changes import BehindPrefix as AfterPrefix
from .changes import Bidirectional as BothWays
from .changes import LayerMask as Masking

__all__ = ["AfterPrefix", "BothWays", "Masking"]

warnings.warn(f"{__name__} is now st_reba.lm.attention.changes: import from there.", DeprecationWarning, stacklevel=2)
