"""Export of models for use without st_reba, with or without ``st-reba export``."""

from .plain import save_plain
from .static import default_layer, static_model

__all__ = ["default_layer", "save_plain", "static_model"]
