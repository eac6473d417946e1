"""Any server beside the saved model that it is to serve, with the reason where they differ."""

from ..lm.endpoint import Endpoint, EndpointError
from .verdict import TOLERANCES, Verdict, verify

__all__ = ["TOLERANCES", "Endpoint", "EndpointError", "Verdict", "verify"]
