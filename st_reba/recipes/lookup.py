"""Which recipes there are, and how they are asked for: by name or key, a few or all, in a language."""

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
from ..text.templates import PromptLanguage
from . import rows
from .recipe import RANDOM, TF_IDF, Control, Recipe, Row

#: The result of the control without a model.
TF_IDF_RESULT = f"{TF_IDF}, mean"

#: Copies of a text, at most, of what can be had by its name.
_MOST_COPIES = 64

# After which layer a recipe is read: in its key, and in its name as tables show it.
_LAYER = re.compile(r"(?:@|, layer )(\d+)")

# Of other people's modules.
_registered: list[Row] = []

_Class = TypeVar("_Class", bound=type[Module])


def every_row(repetitions: int = 3) -> list[Row]:
    """Every recipe that has at most so many copies of the text, from 1."""
    repeated = [row for copies in range(2, repetitions + 1) for row in rows.repeated(copies)]
    every = [*rows.FIRST, *repeated, *rows.OTHERS, *_registered]
    return [row for row in every if row.repetitions <= repetitions]


def default_recipes(repetitions: int = 3, fit_texts: Sequence[str] | None = None) -> list[Recipe]:
    """Every training-free recipe, under the poolings that make sense for it.

    Args:
        repetitions: Copies of the text, at most.
        fit_texts: Plain texts that the filters and the idf weights are fitted on; None: a comparison takes those of the
            package's word-sense questions.
    """
    texts = tuple(fit_texts or ())
    compared = [row for row in every_row(repetitions) if row.compared == "all"]
    recipes = [Recipe(row, pooling, texts, row.around) for row in compared for pooling in row.poolings]
    around = [rows.PARTS[name] for name in (*rows.FILTERS, rows.IDF)]
    recipes += [Recipe(rows.CLASSICAL, pooling, texts, part) for part in around for pooling in part.poolings]
    return without_repeats(recipes)


def worth_trying(fit_texts: Sequence[str] | None = None) -> list[Recipe]:
    """The few recipes to try first: what one has without a recipe, and the best cheap one of each family.

    Args:
        fit_texts: As for :func:`default_recipes`.
    """
    texts = tuple(fit_texts or ())
    return [Recipe(row, pooling, texts, row.around) for row in every_row() for pooling in row.tried]


def asked_for(names: Iterable[str], repetitions: int = 3, fit_texts: Sequence[str] | None = None) -> list[Recipe]:
    """The recipes that someone names, each once.

    Args:
        names: Each ``"few"``, ``"all"``, or as for :func:`find`; keys may stand in one, with commas between.
        repetitions: Copies of the text, at most, of ``"all"``.
        fit_texts: As for :func:`default_recipes`.

    Raises:
        ValueError: If there is no such recipe.
    """
    recipes: list[Recipe] = []
    for name in names:
        if name == "all":
            recipes += default_recipes(repetitions, fit_texts)
        elif name == "few":
            recipes += worth_trying(fit_texts)
        elif "," in name and _known(name) is None:
            recipes += asked_for(map(str.strip, name.split(",")), repetitions, fit_texts)
        else:
            found = replace(find(name), fit_texts=tuple(fit_texts or ()))
            recipes += [replace(found, pooling=pooling) for pooling in found.poolings]
    return list({recipe.result: recipe for recipe in recipes}.values())


def in_language(recipes: Iterable[Recipe], language: PromptLanguage) -> list[Recipe]:
    """The same recipes, each once, with prompts in a language where they have such prompts.

    A recipe that asks in Chinese by its key keeps its prompt.

    Args:
        recipes: As they are asked for.
        language: The one that the user asks for, or that of the texts: see :func:`st_reba.text.templates.language_of`.
    """
    found: list[Recipe] = []
    for recipe in recipes:
        in_chinese = _by_key().get(f"{recipe.row.key}-zh")
        found.append(replace(recipe, row=in_chinese) if in_chinese and language == "zh" else recipe)
    return list({recipe.result: recipe for recipe in found}.values())


def find(name: str) -> Recipe:
    """A recipe under its usual pooling, to be fitted on no texts.

    Args:
        name: As tables show it, such as ``"ReBA-2"`` or ``"Classical, whitened"``; or its key: ``"reba-2"``, to be read
            after a layer ``"reba-2@12"``, and with what stands around the
            pooling ``"classical+whitened"``.

    Raises:
        ValueError: If there is no such recipe.
    """
    found = _known(name)
    if found is None and (name == TF_IDF or _known(name.removeprefix(f"{RANDOM}, ")) is not None):
        raise ValueError(f"{name!r} is a control, to be compared with: it is no model to be built.")
    if found is None:
        keys = [row.key for row in [*every_row(), rows.BAG]]
        parts = [f"+{part.key}" for part in rows.PARTS.values()]
        with_parts = [f"{key}{part}" for key in keys for part in parts]
        typed = re.sub("[_ ]+", "-", name.lower())
        near = get_close_matches(typed, [*keys, *with_parts], n=1 if "+" in name else 3, cutoff=0.75)
        raise ValueError(
            f"There is no recipe {name!r}. {'Near it: ' + ', '.join(near) + '. ' if near else ''}"
            "`st-reba recipes` lists them, and what may stand behind a key."
        )
    if found.part is not None and not found.poolings:
        raise ValueError(
            f"{name!r}: {found.part.name} goes with {' or '.join(found.part.poolings)} pooling, and {found.method} has "
            f"{' or '.join(found.row.poolings)} pooling; leave it out, or give it to another recipe, such as "
            f"classical+{found.part.key}."
        )
    return replace(found, pooling=found.poolings[0])


def _known(name: str) -> Recipe | None:
    """The recipe of a name or a key, if there is one; its pooling is still to be chosen."""
    layer = _LAYER.search(name)
    found = _by_name().get(_LAYER.sub("", name, count=1))
    return found if found is None or layer is None else replace(found, layer=int(layer[1]))


@cache
def _by_key() -> dict[str, Row]:
    listed = {row.key: row for row in every_row(_MOST_COPIES)}
    plain = [row.in_chinese() for row in listed.values() if row.chinese]
    every = [*listed.values(), *(row for row in plain if row.key not in listed)]
    return {row.key: row for row in [*every, rows.BAG]}


@cache
def _by_name() -> dict[str, Recipe]:
    """Every recipe that is read at its own end, by its key and by its name as tables show it."""
    found: dict[str, Recipe] = {}
    for row in _by_key().values():
        found[row.key] = Recipe(row, "", (), row.around)
        found |= {f"{row.key}+{part.key}": Recipe(row, "", (), part) for part in rows.PARTS.values()}
    return {recipe.name: recipe for recipe in reversed(found.values())} | found


def matching(module: type[CausalModule], settings: Mapping[str, Any]) -> Row | None:
    """The recipe that a module with these arguments is, whatever its pooling; None if it is none of them."""
    return next((row for row in _by_key().values() if row.module is module and row.settings == settings), None)


def register(module: _Class, *own: Row) -> _Class:
    """Let saved models that have a module of yours load, and let it stand in comparisons.

    Your package calls it where it is imported, so that ``import theirs; SentenceTransformer(path)`` loads without
    ``trust_remote_code``, and ``import theirs`` before a comparison is all that it takes to be in it.

    Args:
        module: A class of your own, importable under its own name; most often derived from
            :class:`st_reba.modules.CausalModule`.
        *own: Its recipes. None: for a causal module one with its defaults, named by its ``method``; for others none.

    Returns:
        The class, so that this can be a decorator.

    Raises:
        TypeError: If it is no class of modules.
        ValueError: If it is defined where nobody can import it, or a recipe has a key or a name that another one has.
    """
    if not (isinstance(module, type) and issubclass(module, Module)):
        raise TypeError(f"register({module!r}): give a class derived from st_reba's CausalModule or from ST's Module.")
    if "<locals>" in module.__qualname__ or module.__module__ == "__main__":
        raise ValueError(
            f"{module.__name__} is defined in {module.__module__}, {module.__qualname__}: a saved model names its "
            "modules by where they are imported from. Define it at the top of a module that can be imported."
        )
    if not own and issubclass(module, CausalModule):
        own = (_row_of(module),)
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


def _row_of(module: type[CausalModule]) -> Row:
    """The row of a module that comes without one, from what its class says."""
    key = "".join(f"-{sign.lower()}" if sign.isupper() else sign for sign in module.__name__).strip("-")
    summary = (module.__doc__ or module.__name__).strip().splitlines()[0].rstrip(".")
    name = module.method if "method" in vars(module) else module.__name__
    return Row(key, name, module, summary, cost="")


def _reference(module: type[Any]) -> str:
    return f"{module.__module__}.{module.__name__}"


def without_repeats(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The same, with one recipe in place of several that are equal by definition: it names the others.

    Under last pooling the last token is read, which sees the whole text either way: a bidirectional last layer gives it
    nothing new, and without repetition it looks back at itself alone, at :math:`e_n = a_{nn} v_n`. Their word
    embeddings do differ. Those do not depend on the pooling, so that the same rows under other poolings give them.
    """
    last = {recipe.row.key: recipe for recipe in recipes if recipe.pooling == "last" and recipe.name == recipe.row.name}
    kept = []
    for recipe in recipes:
        if recipe is not last.get(recipe.row.key):
            kept.append(recipe)
        elif recipe.row.same_if_last not in last:
            same = [other.name for other in last.values() if other.row.same_if_last == recipe.row.key]
            kept.append(replace(recipe, same_as=tuple(same)))
    return kept


def bags_of_input_embeddings(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The control that looks at no context: as it is, and with each filter and weighting that one of these has.

    What helps a recipe there helps the bag, too, so that its gain means little without it.
    """
    bag = Recipe(rows.BAG, "mean")
    around = {recipe.part: recipe for recipe in recipes if recipe.part is not None}
    return [bag, *(replace(bag, fit_texts=recipe.fit_texts, part=part) for part, recipe in around.items())]


def controls_of(recipe: Recipe) -> tuple[Control, ...]:
    """What a recipe is compared with.

    What stands around a recipe's pooling helps the bag of input embeddings, too. A bag with the same around it is
    therefore a control of its own.
    """
    if recipe.random:
        return ()
    itself = Control("random", recipe.on_random_weights().result, "itself on random weights")
    if recipe.bag:
        return (itself,)
    plain, *alike = bags_of_input_embeddings([recipe])
    return (
        Control("tf-idf", TF_IDF_RESULT, "tf-idf, without any model"),
        Control("bag", plain.result, plain.called),
        *(Control("filtered bag", bag.result, f"{bag.called} as well") for bag in alike),
        itself,
    )
