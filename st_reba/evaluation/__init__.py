"""Evaluators for what sentence-transformers has none for."""

from .agreement import AgreementEvaluator
from .cls_energy import CLSEnergyEvaluator
from .conditional import ConditionalSimilarityEvaluator
from .dependency import DependencyEvaluator
from .geometry import EmbeddingGeometryEvaluator
from .odd_one_out import MissingWordError, OddOneOutEvaluator, Question
from .pair_scores import PairScoreEvaluator
from .turning_point import TurningPointEvaluator

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
]
