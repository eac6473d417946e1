"""Export of models for use without st_reba, with or without ``st-reba export``."""

from .plain import save_plain
from .static import static_model

__all__ = ["save_plain", "static_model"]
