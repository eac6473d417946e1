"""What a causal language model is, and how it is run, watched and changed. Imports no sentence_transformers."""
