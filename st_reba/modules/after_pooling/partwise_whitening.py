"""The former name of :mod:`st_reba.modules.partwise_whitening`."""

import warnings

from ..partwise_whitening import SHRINKAGE, PartwiseWhitening  # noqa: F401

warnings.warn(
    f"{__name__} is now st_reba.modules.partwise_whitening: import from there.", DeprecationWarning, stacklevel=2
)
