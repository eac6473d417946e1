"""Methods that need no training."""
