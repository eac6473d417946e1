"""The former name of :mod:`st_reba.modules.layer_states`."""

import warnings

from ..layer_states import LayerStates  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.layer_states: import from there.", DeprecationWarning, stacklevel=2)
