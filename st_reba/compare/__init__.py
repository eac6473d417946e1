"""Which recipe for this model and these texts."""

from .run import Recipes, RecipeSweep, compare, compare_tasks, work

__all__ = ["RecipeSweep", "Recipes", "compare", "compare_tasks", "work"]
