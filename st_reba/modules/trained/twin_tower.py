"""The former name of :mod:`st_reba.modules.twin_tower`."""

import warnings

from ..twin_tower import TwinTower  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.twin_tower: import from there.", DeprecationWarning, stacklevel=2)
