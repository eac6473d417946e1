"""Embeddings of words, of chunks and after each layer."""
