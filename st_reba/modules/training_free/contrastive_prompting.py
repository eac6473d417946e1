"""The former name of :mod:`st_reba.modules.contrastive_prompting`."""

import warnings

from ..contrastive_prompting import ContrastivePromptingModule  # noqa: F401

warnings.warn(
    f"{__name__} is now st_reba.modules.contrastive_prompting: import from there.", DeprecationWarning, stacklevel=2
)
