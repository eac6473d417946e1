"""The former name of :mod:`st_reba.modules.embedding_filter`."""

import warnings

from ..embedding_filter import EmbeddingFilter  # noqa: F401

warnings.warn(
    f"{__name__} is now st_reba.modules.embedding_filter: import from there.", DeprecationWarning, stacklevel=2
)
