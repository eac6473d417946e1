"""The former name of :mod:`st_reba.modules.reranking`."""

import warnings

from ..reranking import RerankModule, cross_encoder  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.reranking: import from there.", DeprecationWarning, stacklevel=2)
