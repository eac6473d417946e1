"""The old path of :mod:`st_reba.modules.embedding_transforms`."""

import warnings

from ..embedding_transforms import SHRINKAGE as SHRINKAGE
from ..embedding_transforms import WhiteningTransform as WhiteningTransform

warnings.warn(f"{__name__} is now st_reba.modules.embedding_transforms", DeprecationWarning, stacklevel=2)
