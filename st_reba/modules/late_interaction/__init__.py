"""One vector a token, and documents scored by how well they answer each token of a query."""

from .pipeline import DIMENSION, multi_vector_encoder
from .token_projection import TokenProjection

__all__ = ["DIMENSION", "TokenProjection", "multi_vector_encoder"]
