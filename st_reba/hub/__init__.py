"""Model cards, pushing, and what differs between versions of sentence-transformers."""
