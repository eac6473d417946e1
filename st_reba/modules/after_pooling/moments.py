"""The former name of :mod:`st_reba.modules.moments`."""

import warnings

from ..moments import Moments, embedding_moments, principal_directions  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.moments: import from there.", DeprecationWarning, stacklevel=2)
