"""The former name of :mod:`st_reba.modules.embedding_transforms`."""

import warnings

from ..embedding_transforms import AllButTheTop  # noqa: F401

warnings.warn(
    f"{__name__} is now st_reba.modules.embedding_transforms: import from there.", DeprecationWarning, stacklevel=2
)
