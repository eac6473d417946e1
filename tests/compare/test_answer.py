from __future__ import annotations

from math import nan

import numpy as np
import pytest

from st_reba.compare.answer import answer
from st_reba.compare.results import Result, Task
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Estimate

TASK = Task("STS", "Spearman x 100")
BAG, RANDOM = "Bag of input embeddings, mean", "Random weights, PromptEOL, last"
CALLED = {BAG: "the bag of input embeddings", RANDOM: "PromptEOL, last on random weights"}
MEAN, LAST, PROMPT, ECHO = "Classical, mean", "Classical, last", "PromptEOL, last", "Echo-2, mean"


def says(right: dict[str, float], task: Task = TASK, resampled: bool = True, chosen: str = "") -> str:
    """The answer on recipes with such shares of 200 items, the first ones, right."""
    scores = {name: (np.arange(200) < share * 200).astype(float) for name, share in right.items()}
    statistic = bootstrap.mean(scores)
    controls = [name for name in (BAG, RANDOM) if name in right]
    found = bootstrap.estimate(statistic, controls=controls, greater_is_better=task.greater_is_better)
    results = [
        Result(recipe, pooling, name in controls, {task.name: found[name]}, called=CALLED.get(name, ""))
        for name in right
        for recipe, pooling in [name.rsplit(", ", 1)]
    ]
    return answer(results, task, statistic if resampled else None, chosen)


def test_what_to_use_how_much_better_it_is_and_how_sure_that_is():
    right = {BAG: 0.1, RANDOM: 0.1, MEAN: 0.3, LAST: 0.4, PROMPT: 0.7, ECHO: 0.5}
    text = says(right)
    # Of the two that one has without a recipe the better one counts.
    assert text.startswith("Use PromptEOL, last: 70.0 on STS (Spearman x 100), 30.0 [")
    assert text.endswith("] ahead of what you have without a recipe, the last token's hidden state (40.0).")
    low, high = map(float, text.partition("[")[2].partition("]")[0].split(", "))
    # Of 200 items in pairs, 60 differ: a standard error of sqrt(0.3 * 0.7 / 200).
    assert (low, high) == pytest.approx((30 - 6.4, 30 + 6.4), abs=1)


def test_a_difference_that_may_be_chance_is_called_one():
    text = says({MEAN: 0.5, LAST: 0.4, PROMPT: 0.505})
    assert text.startswith("No need for a recipe: PromptEOL, last has 50.5 on STS (Spearman x 100), 0.5 [0.0, ")
    assert text.endswith("the mean of the last hidden states (50.0), and cannot be told from it on these texts.")


def test_when_nothing_is_ahead_of_what_one_has():
    expected = (
        "Use Classical, mean, the mean of the last hidden states, which is no recipe: 60.0 on STS (Spearman x 100)"
    )
    assert says({BAG: 0.1, MEAN: 0.6, LAST: 0.4, PROMPT: 0.5}) == f"{expected}, and nothing is ahead of it."


@pytest.mark.parametrize(
    ("control", "called"),
    CALLED.items(),
)
def test_no_recipe_is_advised_that_a_control_equals(control, called):
    text = says({control: 0.7, MEAN: 0.3, PROMPT: 0.7})
    assert text.startswith(
        f"No recipe to use: PromptEOL, last has 70.0 on STS (Spearman x 100), and a control has 70.0: {called}."
    )
    assert "Use" not in text


def test_what_was_chosen_before_is_what_it_is_about():
    right = {MEAN: 0.4, PROMPT: 0.6, ECHO: 0.7}
    assert says(right, chosen=PROMPT).startswith("Use PromptEOL, last: 60.0 on STS (Spearman x 100), 20.0 [")
    worse = says({MEAN: 0.4, PROMPT: 0.2, ECHO: 0.7}, chosen=PROMPT)
    assert worse.startswith("No need for a recipe: PromptEOL, last has 20.0 on STS (Spearman x 100), −20.0 [−")
    assert worse.endswith("ahead of what you have without a recipe, the mean of the last hidden states (40.0).")


def test_without_what_one_has_there_is_no_difference():
    assert says({PROMPT: 0.6, ECHO: 0.5}) == "Use PromptEOL, last: 60.0 on STS (Spearman x 100)."


def test_where_less_is_better_less_is_ahead():
    task = Task("Loss", "loss", scale=1.0, greater_is_better=False)
    text = says({BAG: 0.9, MEAN: 0.7, PROMPT: 0.4, ECHO: 0.5}, task)
    assert text.startswith("Use PromptEOL, last: 0.400 on Loss (loss), 0.300 [0.2")
    assert text.endswith("ahead of what you have without a recipe, the mean of the last hidden states (0.700).")


def test_nothing_that_can_be_resampled_is_not_sure():
    assert "cannot be told from it" in says({MEAN: 0.4, PROMPT: 0.6}, resampled=False)
    assert "[" not in says({MEAN: 0.4, PROMPT: 0.6}, resampled=False)


def test_proxies_are_no_answer():
    task = Task("Loss", "loss", scale=1.0, greater_is_better=False, proxy=True)
    assert says({MEAN: 0.4, PROMPT: 0.6}, task).startswith("Without labels there is no answer")


def test_no_number_is_no_answer():
    results = [Result("Classical", "mean", False, {"STS": Estimate(nan, nan, nan)})]
    assert answer(results, TASK, None) == "There is no answer: no recipe has a number on STS."
