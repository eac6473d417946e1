"""The old path of :mod:`st_reba.modules.embedding_transforms`."""

import warnings

from ..embedding_transforms import Centering as Centering
from ..embedding_transforms import Standardization as Standardization

warnings.warn(f"{__name__} is now st_reba.modules.embedding_transforms", DeprecationWarning, stacklevel=2)
