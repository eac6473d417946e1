"""The former place of :class:`st_reba.evaluation.rankings.LateInteraction`."""

import warnings

from .rankings import LateInteraction  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.evaluation.rankings: import from there.", DeprecationWarning, stacklevel=2)
