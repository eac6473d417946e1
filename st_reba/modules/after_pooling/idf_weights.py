"""The former name of :mod:`st_reba.modules.idf_weights`."""

import warnings

from ..idf_weights import IdfWeights  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.idf_weights: import from there.", DeprecationWarning, stacklevel=2)
