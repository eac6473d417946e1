"""The former name of :mod:`st_reba.modules.hierarchical_token_prepending`."""

import warnings

from ..hierarchical_token_prepending import HierarchicalTokenPrependingModule  # noqa: F401

warnings.warn(
    f"{__name__} is now st_reba.modules.hierarchical_token_prepending: import from there.",
    DeprecationWarning,
    stacklevel=2,
)
