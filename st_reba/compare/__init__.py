"""Comparison of recipes on one model and labelled texts."""

from ..evaluation.embedded import TensorCache
from .cost import forecast
from .recipes import Recipes
from .run import compare, prepared, texts_of
from .splits import Splits
from .sweep import RecipeSweep

__all__ = ["RecipeSweep", "Recipes", "Splits", "TensorCache", "compare", "forecast", "prepared", "texts_of"]
