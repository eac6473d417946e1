"""The former name of :mod:`st_reba.evaluation.store`."""

import warnings

from ..evaluation.store import EmbeddingStore, stand_in  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.evaluation.store: import from there.", DeprecationWarning, stacklevel=2)
