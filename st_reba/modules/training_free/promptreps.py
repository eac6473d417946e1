"""The former name of :mod:`st_reba.modules.promptreps`."""

import warnings

from ..promptreps import PromptRepsModule  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.promptreps: import from there.", DeprecationWarning, stacklevel=2)
