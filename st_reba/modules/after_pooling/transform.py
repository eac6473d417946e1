"""The old path of :mod:`st_reba.modules.embedding_transforms`."""

import warnings

from ..embedding_transforms import EmbeddingTransform as EmbeddingTransform

warnings.warn(f"{__name__} is now st_reba.modules.embedding_transforms", DeprecationWarning, stacklevel=2)
