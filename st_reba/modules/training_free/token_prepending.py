"""The former name of :mod:`st_reba.modules.token_prepending`."""

import warnings

from ..token_prepending import TokenPrependingModule  # noqa: F401

warnings.warn(
    f"{__name__} is now st_reba.modules.token_prepending: import from there.", DeprecationWarning, stacklevel=2
)
