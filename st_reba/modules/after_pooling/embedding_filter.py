"""The old path of :mod:`st_reba.modules.embedding_filter`."""

import warnings

from ..embedding_filter import EmbeddingFilter as EmbeddingFilter

warnings.warn(f"{__name__} is now st_reba.modules.embedding_filter", DeprecationWarning, stacklevel=2)
