"""Lookup of recipes: by name or key, a few or all, in a language; and registration of new ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

from sentence_transformers.base.modules import Module

from ..hub import compat
from ..modules import CausalModule
from ..text.presets import PromptLanguage
from . import rows
from .recipe import RANDOM, TF_IDF, Recipe, Row

#: Name of the result of the control without a model.
TF_IDF_RESULT = f"{TF_IDF}, mean"

#: Largest number of copies of a text in a recipe that is found by its name.
_MOST_COPIES = 64

# Layer in a recipe's key, and in its name.
_LAYER = re.compile(r"(?:@|, layer )(\d+)")

# Beginnings of the words of a class's name, after the first. Capitals in a row are one word.
_WORD = re.compile("(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

# Rows of other packages' modules.
_registered: list[Row] = []

_Class = TypeVar("_Class", bound=type[Module])


def every_row(repetitions: int = 3) -> list[Row]:
    """Return every row with at most ``repetitions`` copies of the text."""
    repeated = [row for copies in range(2, repetitions + 1) for row in rows.repeated(copies)]
    every = [*rows.FIRST, *repeated, *rows.OTHERS, *_registered]
    return [row for row in every if row.repetitions <= repetitions]


def default_recipes() -> list[Recipe]:
    """Return every training-free recipe under the poolings that fit it, without texts to fit on."""
    compared = [row for row in every_row() if row.compared == "all"]
    recipes = [Recipe(row, pooling, (), row.post_processor) for row in compared for pooling in row.poolings]
    added = [rows.POST_PROCESSORS[name] for name in (*rows.FILTERS, rows.IDF)]
    return recipes + [Recipe(rows.CLASSICAL, pooling, (), part) for part in added for pooling in part.poolings]


def worth_trying() -> list[Recipe]:
    """Return the few recipes to try first: the embedding without a recipe, and the best cheap one of each family."""
    return [Recipe(row, pooling, (), row.post_processor) for row in every_row() for pooling in row.tried]


def asked_for(names: Iterable[str], fit_texts: Sequence[str] | None = None) -> list[Recipe]:
    """Return the recipes of some names, each once.

    Args:
        names: Each is ``"few"``, ``"all"``, a name for :func:`find`, or several keys with commas between.
        fit_texts: Plain texts on which filters and idf weights are fitted; None: a comparison takes those of the
            package's word-sense questions.

    Raises:
        ValueError: If there is no such recipe.
    """
    recipes: list[Recipe] = []
    for name in names:
        if name == "all":
            recipes += default_recipes()
        elif name == "few":
            recipes += worth_trying()
        elif "," in name and _known(name) is None:
            recipes += asked_for(map(str.strip, name.split(",")))
        else:
            recipe = find(name)
            recipes += [replace(recipe, pooling=pooling) for pooling in recipe.poolings]
    texts = tuple(fit_texts or ())
    return list({recipe.result: replace(recipe, fit_texts=texts) for recipe in recipes}.values())


def in_language(recipes: Iterable[Recipe], language: PromptLanguage) -> list[Recipe]:
    """Return the same recipes, each once, with prompts in a language if they have such prompts.

    A recipe whose key names a Chinese prompt keeps it.

    Args:
        recipes: The recipes.
        language: The user's choice, or that of the texts: see :func:`st_reba.text.presets.language_of`.
    """
    if language == "zh":
        recipes = [replace(recipe, row=_by_key().get(f"{recipe.row.key}-zh", recipe.row)) for recipe in recipes]
    return list({recipe.result: recipe for recipe in recipes}.values())


def find(name: str) -> Recipe:
    """Return a recipe under its usual pooling, without texts to fit on.

    Args:
        name: Name in tables, such as ``"ReBA-2"`` or ``"Classical, whitened"``; or key: ``"reba-2"``, ``"reba-2@12"``
            to end after a layer, ``"classical+whitened"`` with a filter.

    Raises:
        ValueError: If there is no such recipe.
    """
    recipe = _known(name)
    if recipe is None and (name == TF_IDF or _known(name.removeprefix(f"{RANDOM}, ")) is not None):
        raise ValueError(f"{name!r} is a control, to be compared with: it is no model to be built.")
    if recipe is None:
        keys = [row.key for row in [*every_row(), rows.BAG]]
        with_parts = [f"{key}+{part.key}" for key in keys for part in rows.POST_PROCESSORS.values()]
        typed = re.sub("[_ ]+", "-", name.lower())
        near = get_close_matches(typed, [*keys, *with_parts], n=1 if "+" in name else 3, cutoff=0.75)
        raise ValueError(
            f"There is no recipe {name!r}. {'Near it: ' + ', '.join(near) + '. ' if near else ''}"
            "`st-reba recipes` lists them, and what may follow a key."
        )
    part = recipe.post_processor
    if part is not None and not recipe.poolings:
        raise ValueError(
            f"{name!r}: {part.name} goes with {' or '.join(part.poolings)} pooling, and {recipe.row.name} has "
            f"{' or '.join(recipe.row.poolings)} pooling; leave it out, or give it to another recipe, such as "
            f"classical+{part.key}."
        )
    return replace(recipe, pooling=recipe.poolings[0])


def _known(name: str) -> Recipe | None:
    """Return the recipe of a name or a key, without a pooling; None if there is none."""
    layer = _LAYER.search(name)
    recipe = _by_name().get(_LAYER.sub("", name, count=1))
    if recipe is None or layer is None:
        return recipe
    return replace(recipe, layer=int(layer[1]))


@cache
def _by_key() -> dict[str, Row]:
    listed = {row.key: row for row in every_row(_MOST_COPIES)}
    translated = {f"{row.key}-zh": row.in_chinese() for row in listed.values() if row.chinese}
    return {**translated, **listed, rows.BAG.key: rows.BAG}


@cache
def _by_name() -> dict[str, Recipe]:
    """Return every recipe that ends after its own layer, by key and by name in tables."""
    recipes: dict[str, Recipe] = {}
    for row in _by_key().values():
        recipes[row.key] = Recipe(row, "", (), row.post_processor)
        recipes |= {f"{row.key}+{part.key}": Recipe(row, "", (), part) for part in rows.POST_PROCESSORS.values()}
    return {recipe.name: recipe for recipe in reversed(recipes.values())} | recipes


def matching(module: type[CausalModule], settings: Mapping[str, Any]) -> Row | None:
    """Return the row of a module with these arguments; None if there is none."""
    return next((row for row in _by_key().values() if row.module is module and row.settings == settings), None)


def register(module: _Class, *own: Row) -> _Class:
    """Let saved models with a module of yours load, and let it take part in comparisons.

    Call it where your package is imported. ``import yours; SentenceTransformer(path)`` then loads without
    ``trust_remote_code``, and a comparison after ``import yours`` knows its recipes.

    Args:
        module: Your class, importable under its own name, for instance derived from
            :class:`st_reba.modules.CausalModule`.
        *own: Its recipes. None: for a causal module one with its defaults, named by its ``method``, whose key is the
            class's name in lower case, with hyphens: ``double-eol`` for ``DoubleEOL``; for others none.

    Returns:
        The class, so that this can be a decorator.

    Raises:
        TypeError: If it is not a class of modules.
        ValueError: If nobody can import it, or a recipe has the key or the name of another one.
    """
    if not (isinstance(module, type) and issubclass(module, Module)):
        raise TypeError(f"register({module!r}): give a class derived from st_reba's CausalModule or from ST's Module.")
    if "<locals>" in module.__qualname__ or module.__module__ == "__main__":
        raise ValueError(
            f"{module.__name__} is defined in {module.__module__}, {module.__qualname__}: a saved model names its "
            "modules by where they are imported from. Define it at the top of a module that can be imported."
        )
    if not own and issubclass(module, CausalModule):
        own = (_default_row(module),)
    # A module that is reloaded registers again.
    others = [row for row in _by_key().values() if _reference(row.module) != _reference(module)]
    for row in own:
        if any(row.key == other.key or row.name == other.name for other in others):
            raise ValueError(f"There is a recipe {row.key!r} or {row.name!r} already: give another key and name.")
    compat.make_known(module)
    _registered[:] = [row for row in _registered if _reference(row.module) != _reference(module)] + list(own)
    _by_key.cache_clear()
    _by_name.cache_clear()
    return module


def _default_row(module: type[CausalModule]) -> Row:
    """Return the row of a module that is registered without one."""
    key = _WORD.sub("-", module.__name__).lower().replace("_", "-").strip("-")
    summary = (module.__doc__ or module.__name__).strip().splitlines()[0].rstrip(".")
    name = module.method if "method" in vars(module) else module.__name__
    return Row(key, name, module, summary, cost="")


def _reference(module: type[Any]) -> str:
    return f"{module.__module__}.{module.__name__}"


def bags_of_input_embeddings(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Return the control without context: alone, and with each filter and weighting of the recipes.

    A filter that helps a recipe helps the bag, too, so that its gain alone means little.
    """
    bag = Recipe(rows.BAG, "mean")
    fitted = {recipe.post_processor: recipe.fit_texts for recipe in recipes if recipe.post_processor is not None}
    return [bag, *(replace(bag, post_processor=part, fit_texts=texts) for part, texts in fitted.items())]
