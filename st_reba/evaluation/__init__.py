"""Evaluators for what sentence-transformers has none for."""

from .layers import DependencyEvaluator, TurningPointEvaluator
from .mteb import mteb_model
from .odd_one_out import MissingWordError, OddOneOutEvaluator, Question
from .pairs import ConditionalSimilarityEvaluator, PairScoreEvaluator

__all__ = [
    "ConditionalSimilarityEvaluator",
    "DependencyEvaluator",
    "MissingWordError",
    "OddOneOutEvaluator",
    "PairScoreEvaluator",
    "Question",
    "TurningPointEvaluator",
    "mteb_model",
]
