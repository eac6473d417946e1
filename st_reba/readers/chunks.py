"""The former name of :mod:`st_reba.reading.chunks`."""

import warnings

from ..reading.chunks import DocumentChunks, encode_chunks  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.reading.chunks: import from there.", DeprecationWarning, stacklevel=2)
