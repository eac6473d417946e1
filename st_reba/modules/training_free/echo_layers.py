"""The former name of :mod:`st_reba.modules.echo_layers`."""

import warnings

from ..echo_layers import EchoLayersModule  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.echo_layers: import from there.", DeprecationWarning, stacklevel=2)
