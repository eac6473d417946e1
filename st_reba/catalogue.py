"""The former name of :mod:`st_reba.recipes`."""

import warnings

from .recipes import (  # noqa: F401
    Control,
    Part,
    Recipe,
    Row,
    asked_for,
    default_recipes,
    every_row,
    find,
    random_weights,
    register,
    worth_trying,
)

warnings.warn(f"{__name__} is now st_reba.recipes: import from there.", DeprecationWarning, stacklevel=2)
