"""What ``benchmarks/real_models.py`` measures, and how: text lists, passes, kept vectors and scores."""
