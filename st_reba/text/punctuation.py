"""The old place of :func:`st_reba.text.words.punctuation_tokens`."""

import warnings

from .words import punctuation_tokens as punctuation_tokens

warnings.warn(f"{__name__} is now st_reba.text.words: import from there.", DeprecationWarning, stacklevel=2)
