"""The former name of :mod:`st_reba.modules.value_aggregation`."""

import warnings

from ..value_aggregation import ValueAggregationModule  # noqa: F401

warnings.warn(
    f"{__name__} is now st_reba.modules.value_aggregation: import from there.", DeprecationWarning, stacklevel=2
)
