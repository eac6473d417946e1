"""Evaluators for what sentence-transformers has none for."""

from .dependency import DependencyEvaluator
from .odd_one_out import OddOneOutEvaluator, Question
from .turning_point import TurningPointEvaluator

__all__ = ["DependencyEvaluator", "OddOneOutEvaluator", "Question", "TurningPointEvaluator"]
