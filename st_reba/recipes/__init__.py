"""Recipes: methods with settings, poolings and filters, by name and key.

:mod:`.rows` has each recipe once, as plain data, for comparisons, ``st-reba build``, reports, model cards, the
documentation and tests.
"""

from .lookup import asked_for, default_recipes, every_row, find, register, worth_trying
from .recipe import PostProcessor, Recipe, Row, random_weights

__all__ = [
    "PostProcessor", "Recipe", "Row", "asked_for", "default_recipes", "every_row", "find", "random_weights", "register",
    "worth_trying",
]  # fmt: skip
