"""Vectors within a text: of its words, of its chunks, after each layer."""
