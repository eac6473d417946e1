"""The old path of :mod:`st_reba.modules.idf_weights`."""

import warnings

from ..idf_weights import IdfWeights as IdfWeights

warnings.warn(f"{__name__} is now st_reba.modules.idf_weights", DeprecationWarning, stacklevel=2)
