"""Models for other places: what ``st-reba export`` writes, usable without it. One file a kind."""

from .plain import save_plain
from .static import static_model, token_vectors, usual_layer

__all__ = ["save_plain", "static_model", "token_vectors", "usual_layer"]
