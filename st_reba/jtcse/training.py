"""The former name of :mod:`st_reba.training.jtcse`."""

import warnings

from ..training.jtcse import JTCSETraining, train_jtcse  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.training.jtcse: import from there.", DeprecationWarning, stacklevel=2)
