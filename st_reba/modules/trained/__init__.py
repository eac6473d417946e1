"""Methods that are trained."""
