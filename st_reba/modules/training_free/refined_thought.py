"""The former name of :mod:`st_reba.modules.refined_thought`."""

import warnings

from ..refined_thought import RefinedThoughtModule  # noqa: F401

warnings.warn(
    f"{__name__} is now st_reba.modules.refined_thought: import from there.", DeprecationWarning, stacklevel=2
)
