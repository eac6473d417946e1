"""A Hub on loopback, and what is pushed to it and loaded from it."""
