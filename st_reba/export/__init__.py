"""Models for other places: what ``st-reba export`` writes, usable without it. One file a kind."""

from .plain import save_plain

__all__ = ["save_plain"]
