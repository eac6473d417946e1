"""Models for other places: what ``st-reba export`` writes, usable without it. One file a kind."""

from .static import static_model, token_vectors, usual_layer

__all__ = ["static_model", "token_vectors", "usual_layer"]
