"""Attention that hooks can watch and change, and the hooks that do."""
