"""The recipe that a comparison chose, as a model of its own."""

from __future__ import annotations

from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from . import card
from .files import whole_directory
from .reading import Recipes
from .results import Comparison


def save_best(comparison: Comparison, recipes: Recipes, out: Path) -> SentenceTransformer:
    """Write the recipe to use as a SentenceTransformer directory, with its scores on its card.

    That is the best of the comparison, or what a search had chosen on other texts; the card says which.

    Args:
        comparison: Says which recipe it is.
        recipes: What was compared.
        out: Directory to write; it must not exist yet, or be empty.

    Returns:
        The model, whose vectors are of length 1.

    Raises:
        ValueError: If the comparison had proxies only, or ``out`` holds something.
    """
    if comparison.tasks[0].proxy:
        raise ValueError("Without labels no recipe is known to be the best: use st-reba build to choose one yourself.")
    best = comparison.choice()
    recipe = next(recipe for recipe in recipes.all if recipe.key == best.name)
    parts = list(recipe.model(recipes.backbone).children())
    model = SentenceTransformer(modules=[*parts, Normalize()], device=str(recipes.backbone.model.device))
    card.add_comparison(model, comparison)
    with whole_directory(out, "--save-best") as scratch:
        model.save_pretrained(str(scratch))
    return model
