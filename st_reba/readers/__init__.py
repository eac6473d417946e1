"""Several recipes, layers or words out of one pass."""
