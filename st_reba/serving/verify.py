"""The former name of :mod:`st_reba.verify`."""

import warnings

from ..verify import TOLERANCES, Endpoint, EndpointError, Verdict, verify  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.verify: import from there.", DeprecationWarning, stacklevel=2)
