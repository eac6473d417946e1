"""The old path of :mod:`st_reba.modules.partwise_whitening`."""

import warnings

from ..partwise_whitening import SHRINKAGE as SHRINKAGE
from ..partwise_whitening import PartwiseWhitening as PartwiseWhitening

warnings.warn(f"{__name__} is now st_reba.modules.partwise_whitening", DeprecationWarning, stacklevel=2)
