"""The old path of :mod:`st_reba.modules.multi_vector`."""

import warnings

from ..multi_vector import DIMENSION as DIMENSION
from ..multi_vector import multi_vector_encoder as multi_vector_encoder
from ..token_projection import TokenProjection as TokenProjection

warnings.warn(f"{__name__} is now st_reba.modules.multi_vector", DeprecationWarning, stacklevel=2)
