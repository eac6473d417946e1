"""Evaluators for what sentence-transformers has none for."""

from .evaluators import ConditionalSimilarityEvaluator as ConditionalSimilarityEvaluator
from .evaluators import MissingWordError as MissingWordError
from .evaluators import OddOneOutEvaluator as OddOneOutEvaluator
from .evaluators import PairScoreEvaluator as PairScoreEvaluator
from .evaluators import Question as Question
from .layers import DependencyEvaluator as DependencyEvaluator
from .layers import TurningPointEvaluator as TurningPointEvaluator
from .mteb import mteb_model as mteb_model
