"""The former name of :mod:`st_reba.training.losses`."""

import warnings

from ..training.losses import InteractionInfoNCELoss  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.training.losses: import from there.", DeprecationWarning, stacklevel=2)
