"""Evaluators for what sentence-transformers has none for."""

from typing import TYPE_CHECKING, Any

from .agreement import AgreementEvaluator
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

if TYPE_CHECKING:
    from ..jtcse.cls_energy import CLSEnergyEvaluator


def __getattr__(name: str) -> Any:
    """That of JTCSE, which lies with the rest of it and stands on this package."""
    if name != "CLSEnergyEvaluator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ..jtcse.cls_energy import CLSEnergyEvaluator

    return CLSEnergyEvaluator
