"""The old path of :mod:`st_reba.modules.moments`."""

import warnings

from ..moments import Moments as Moments
from ..moments import embedding_moments as embedding_moments
from ..moments import principal_directions as principal_directions
from ..moments import whole_dimension as whole_dimension

warnings.warn(f"{__name__} is now st_reba.modules.moments", DeprecationWarning, stacklevel=2)
