"""The former name of :mod:`st_reba.modules.causal_transformer`."""

import warnings

from ..causal_transformer import CausalTransformer, InputEmbeddings  # noqa: F401

warnings.warn(
    f"{__name__} is now st_reba.modules.causal_transformer: import from there.", DeprecationWarning, stacklevel=2
)
