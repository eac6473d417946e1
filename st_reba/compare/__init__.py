"""Which recipe for this model and these texts."""

from ..evaluation.embedded import TensorCache
from .cost import forecast
from .recipes import Recipes
from .run import compare, texts_of
from .sweep import RecipeSweep

__all__ = ["RecipeSweep", "Recipes", "TensorCache", "compare", "forecast", "texts_of"]
