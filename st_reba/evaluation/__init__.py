"""Evaluators for what sentence-transformers has none for."""

from .odd_one_out import OddOneOutEvaluator, Question

__all__ = ["OddOneOutEvaluator", "Question"]
