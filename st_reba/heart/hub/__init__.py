"""Files of saved models."""
