"""A saved model behind HTTP: what ``st-reba serve`` runs.

Needs the extra ``serve``: ``pip install "st-reba[serve]"``.
"""

from .app import Server, make_app
from .batches import Limits
from .models import Embedder, ListReranker, MultiVectorEmbedder, Reranker, SparseEmbedder

__all__ = [
    "Embedder", "Limits", "ListReranker", "MultiVectorEmbedder", "Reranker", "Server", "SparseEmbedder", "make_app",
]  # fmt: skip
