"""What ``st-reba compare`` runs by default, on a model that may be loaded already."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from torch import nn

from ..data.tables import Labelled
from ..lm.backbone import depth
from ..modules import CausalModule, CausalTransformer
from ..recipes import asked_for
from ..recipes.lookup import in_language
from ..text.templates import language_of
from .choice import Halves, with_candidates
from .recipes import Recipes


def usual(
    model: str | PathLike[str] | nn.Module, data: Labelled, texts: Sequence[str], tokenizer: Any = None
) -> tuple[Recipes, Halves | None]:
    """The few recipes, asking in the language of the texts; beside labels each with its candidates.

    Args:
        model: As for :class:`st_reba.CausalTransformer`.
        data: What they are compared on.
        texts: Those of the data.
        tokenizer: That of a loaded language model.

    Returns:
        The recipes; and the halves of the data, on one of which is chosen what is scored on the other. None where there
        are too few labels.

    Raises:
        ValueError: As for :class:`st_reba.CausalTransformer`.
    """
    given: dict[str, Any] = {} if tokenizer is None else {"tokenizer": tokenizer}
    if isinstance(model, str | PathLike):
        given["model_kwargs"] = {"dtype": "auto"}
    backbone = model if isinstance(model, CausalModule) else CausalTransformer(model, **given)
    recipes = in_language(asked_for(["few"]), language_of(texts) or "en")
    try:
        halves = Halves.of(data)
    except ValueError:
        # Too few to choose on one half.
        return Recipes(backbone, recipes), None
    recipes = [each for recipe in recipes for each in with_candidates(recipe, depth(backbone.model))]
    return Recipes(backbone, recipes, fit_on=halves.fit_on), halves
