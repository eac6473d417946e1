"""The former name of :mod:`st_reba.modules.multi_vector`."""

import warnings

from .multi_vector import DIMENSION, TokenProjection, multi_vector_encoder  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.multi_vector: import from there.", DeprecationWarning, stacklevel=2)
