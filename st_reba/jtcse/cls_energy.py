"""The former name of :mod:`st_reba.evaluation.cls_energy`."""

import warnings

from ..evaluation.cls_energy import CLSEnergyEvaluator  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.evaluation.cls_energy: import from there.", DeprecationWarning, stacklevel=2)
