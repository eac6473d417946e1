"""Text and template become token ids. Imports no model and no sentence_transformers."""
