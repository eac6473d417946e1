from __future__ import annotations

import pytest

from st_reba.catalogue import default_recipes
from st_reba.compare.report.glossary import describe


def test_every_recipe_of_a_comparison_is_described():
    for recipe in default_recipes():
        says = describe(recipe.name)
        assert says[0].isupper()
        assert says.endswith(".")


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("Echo-4", "The text stands 4 times, and is read in its last copy."),
        ("ReBA-1", "Backward attention without repetition: each token looks back"),
        ("ReBA-2, bidirectional", "weighted by the model's own attention; the last layer attends both ways."),
        ("PromptEOL", "The last token of a prompt that asks what the text means in one word."),
        (
            "PromptEOL, Chinese",
            "The last token of a prompt that asks what the text means in one word; in Chinese words.",
        ),
        ("Random weights, Echo-2", "weights that were never trained; the text stands 2 times"),
    ],
)
def test_what_it_says(recipe, says):
    assert says in describe(recipe)


@pytest.mark.parametrize("recipe", ["", "mine", "Echo-2, upside down", "Echo-two", "Random weights, mine"])
def test_of_what_it_does_not_know_it_says_nothing(recipe):
    assert describe(recipe) == ""
