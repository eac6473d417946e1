"""Embeddings of words and of chunks."""
