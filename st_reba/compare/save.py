"""The recipe that a comparison chose, as a model of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from ..evaluation.tasks import Measure
from ..files import atomic_directory
from ..hub import card
from .recipes import Recipes
from .results import TIED, Comparison, Result, best_of


def save_best(comparison: Comparison, recipes: Recipes, out: Path) -> SentenceTransformer:
    """Write the recipe to use as a SentenceTransformer directory, with its scores on its card.

    That is what the answer names, or the best where it names none; or what a search had chosen on other texts. The card
    says which.

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
    recipe = next(recipe for recipe in recipes.all if recipe.result == best.name)
    parts = list(recipes.model(best.name).children())
    device = str(recipes.backbone.model.device)
    model = SentenceTransformer(modules=[*parts, Normalize()], device=device, prompts=comparison.prompts or None)
    card.add_recipe(model, recipe.name, recipe.key, recipe.says, recipe.row.citation)
    add_comparison(model, comparison)
    with atomic_directory(out, "--save-best") as scratch:
        model.save_pretrained(str(scratch))
    return model


def add_comparison(model: SentenceTransformer, comparison: Comparison) -> None:
    """Put the scores of the recipe that a comparison chose, which this model is, and of its controls onto its card."""
    best = comparison.choice()
    controls = {control.name for control in best.controls}
    shown = [best, *(other for other in comparison.results if other.name in controls)]
    rows: dict[str, Any] = {
        "answer": comparison.answer,
        "data": comparison.data,
        "chosen_before": bool(comparison.chosen),
        "date": comparison.date,
        "command": comparison.command,
        "columns": [f"{task.name} ({task.metric})" for task in comparison.tasks],
        "rows": [
            [
                other.name,
                *(_score(other, task, other is best_of(comparison.results, task)) for task in comparison.tasks),
            ]
            for other in shown
        ],
        "verdict": comparison.verdict,
    }
    card.adopt(model).comparison = rows


def _score(result: Result, task: Measure, best: bool) -> str:
    score = result.scores.get(task.name)
    if score is None:
        return ""
    tied = TIED if score.tied and not best else ""
    return f"{task.show(score.value)}{tied} {task.show_interval(score)}".rstrip()
