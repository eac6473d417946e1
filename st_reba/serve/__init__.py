"""A server for a saved model, which ``st-reba serve`` runs.

Needs the extra ``serve``: ``pip install "st-reba[serve]"``.
"""

from .app import Server, make_app
from .models import Embedder, ListReranker, Reranker
from .requests import Limits

__all__ = ["Embedder", "Limits", "ListReranker", "Reranker", "Server", "make_app"]
