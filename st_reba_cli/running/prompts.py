"""In which language recipes ask about texts."""

from __future__ import annotations

from collections.abc import Sequence

from st_reba.recipes import Recipe, find
from st_reba.recipes.lookup import in_language
from st_reba.text.templates import PromptLanguage

from ..common import Language
from ..printing import notes

_NAMES = {"en": "English", "zh": "Chinese"}


def in_asked_language(recipes: Sequence[Recipe], asked: Language | None, texts: PromptLanguage) -> list[Recipe]:
    """The recipes with prompts in the language that is asked for, or else in that of the texts, which is told.

    Args:
        recipes: As they are named.
        asked: ``--prompt-language``.
        texts: What :func:`st_reba.text.templates.language_of` finds the texts in.

    Raises:
        ValueError: If none of the recipes can ask in the language that is asked for.
    """
    if asked is None:
        found = in_language(recipes, texts)
        turned = [recipe.row for recipe in recipes if recipe.row.chinese] if texts == "zh" else []
        if names := dict.fromkeys(find(row.unchanged or row.key).row.name for row in turned):
            asks = "asks" if len(names) == 1 else "ask"
            notes.print(
                f"The texts are in {_NAMES[texts]}, and so {asks} {', '.join(names)}; --prompt-language en keeps the "
                "English prompt.",
                soft_wrap=True,
            )
        return found
    if not any(asked.value in recipe.row.prompt_languages for recipe in recipes):
        raise ValueError(
            f"--prompt-language {asked.value}: {', '.join(dict.fromkeys(recipe.key for recipe in recipes))} cannot "
            f"ask in {_NAMES[asked.value]}; leave it out, or give a recipe that can, such as prompteol."
        )
    return in_language(recipes, asked.value)
