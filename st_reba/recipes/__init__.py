"""Recipes: methods with settings, poolings and filters, by name and key.

:mod:`.rows` has each recipe once, as plain data, for comparisons, ``st-reba build``, reports, model cards, the
documentation and tests.
"""

from .lookup import asked_for as asked_for
from .lookup import default_recipes as default_recipes
from .lookup import every_row as every_row
from .lookup import find as find
from .lookup import register as register
from .lookup import worth_trying as worth_trying
from .recipe import PostProcessor as PostProcessor
from .recipe import Recipe as Recipe
from .recipe import Row as Row
from .recipe import random_weights as random_weights
