"""The recipes: what they are, which there are, and how they are asked for.

:mod:`.rows` has each of them once, as plain data. ``compare`` and its search, ``st-reba build``, the report's glossary,
the model card, the tables of methods in the documentation and the matrices of the tests read those rows.
"""

from .lookup import asked_for as asked_for
from .lookup import default_recipes as default_recipes
from .lookup import every_row as every_row
from .lookup import find as find
from .lookup import register as register
from .lookup import worth_trying as worth_trying
from .recipe import Control as Control
from .recipe import Part as Part
from .recipe import Recipe as Recipe
from .recipe import Row as Row
from .recipe import random_weights as random_weights
