"""The former name of :mod:`st_reba.modules.echo`."""

import warnings

from ..echo import EchoModule  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.echo: import from there.", DeprecationWarning, stacklevel=2)
