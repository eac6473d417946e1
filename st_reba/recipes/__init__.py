"""The recipes: what they are, which there are, and how they are asked for.

:mod:`.rows` has each of them once, as plain data. ``compare`` and its search, ``st-reba build``, the report's glossary,
the model card, the tables of methods in the documentation and the matrices of the tests read those rows.
"""

from .lookup import TF_IDF_RESULT as TF_IDF_RESULT
from .lookup import asked_for as asked_for
from .lookup import bags_of_input_embeddings as bags_of_input_embeddings
from .lookup import changed as changed
from .lookup import controls_of as controls_of
from .lookup import default_recipes as default_recipes
from .lookup import every_row as every_row
from .lookup import find as find
from .lookup import in_language as in_language
from .lookup import matching as matching
from .lookup import register as register
from .lookup import without_repeats as without_repeats
from .lookup import worth_trying as worth_trying
from .parts import FILTERS as FILTERS
from .parts import IDF as IDF
from .parts import PARTS as PARTS
from .parts import PARTWISE as PARTWISE
from .parts import POOLINGS as POOLINGS
from .parts import Part as Part
from .recipe import RANDOM as RANDOM
from .recipe import TF_IDF as TF_IDF
from .recipe import Control as Control
from .recipe import Kind as Kind
from .recipe import Recipe as Recipe
from .recipe import Row as Row
from .recipe import random_model as random_model
from .recipe import random_weights as random_weights
