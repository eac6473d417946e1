"""The former name of :mod:`st_reba.reading.words`."""

import warnings

from ..reading.words import WordTokens, encode_words, find_words, pool_words  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.reading.words: import from there.", DeprecationWarning, stacklevel=2)
