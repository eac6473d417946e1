"""A Hub on loopback: as much of the Hub's HTTP API as the unmodified huggingface_hub client needs."""

from .server import RunningHub
from .storage import Storage, User

__all__ = ["RunningHub", "Storage", "User"]
