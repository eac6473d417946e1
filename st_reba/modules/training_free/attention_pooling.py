"""The former name of :mod:`st_reba.modules.attention_pooling`."""

import warnings

from ..attention_pooling import AttentionPoolingModule  # noqa: F401

warnings.warn(
    f"{__name__} is now st_reba.modules.attention_pooling: import from there.", DeprecationWarning, stacklevel=2
)
