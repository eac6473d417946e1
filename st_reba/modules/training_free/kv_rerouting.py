"""The former name of :mod:`st_reba.modules.kv_rerouting`."""

import warnings

from ..kv_rerouting import KVReroutingModule  # noqa: F401

warnings.warn(f"{__name__} is now st_reba.modules.kv_rerouting: import from there.", DeprecationWarning, stacklevel=2)
