"""Evaluators for what sentence-transformers has none for."""

from .cls_energy import CLSEnergyEvaluator
from .geometry import EmbeddingGeometryEvaluator
from .layers import DependencyEvaluator, TurningPointEvaluator
from .mteb import mteb_model
from .odd_one_out import MissingWordError, OddOneOutEvaluator, Question
from .pairs import AgreementEvaluator, ConditionalSimilarityEvaluator, PairScoreEvaluator

__all__ = [
    "AgreementEvaluator",
    "CLSEnergyEvaluator",
    "ConditionalSimilarityEvaluator",
    "DependencyEvaluator",
    "EmbeddingGeometryEvaluator",
    "MissingWordError",
    "OddOneOutEvaluator",
    "PairScoreEvaluator",
    "Question",
    "TurningPointEvaluator",
    "mteb_model",
]
