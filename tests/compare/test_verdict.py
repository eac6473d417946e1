from __future__ import annotations

from math import nan

import numpy as np
import pytest

from st_reba.compare.answer import Standing, verdict
from st_reba.compare.results import Result
from st_reba.evaluation import bootstrap
from st_reba.evaluation.tasks import Measure
from st_reba.recipes import Control

TASK = Measure("STS", "accuracy x 100")
BAG, RANDOM_A, RANDOM_B = "Bag of input embeddings", "Random weights, A", "Random weights, B"
BAG_WHITENED = "Bag of input embeddings, whitened"
TF_IDF, RANDOM_BAG = "tf-idf", "Random weights, Bag of input embeddings, whitened"
#: The controls, and what they are called in a sentence.
CONTROLS = {
    TF_IDF: "tf-idf, without any model",
    BAG: "the bag of input embeddings",
    BAG_WHITENED: "the bag of input embeddings, whitened",
    RANDOM_BAG: "the bag of random embeddings, whitened",
    RANDOM_A: "A, mean on random weights",
    RANDOM_B: "B, mean on random weights",
}


def controls(name: str) -> tuple[Control, ...]:
    """What a recipe is to be held against; of those whose names say so, behind a filter, too."""
    bag = Control("filtered bag", f"{BAG_WHITENED}, mean", "the bag of input embeddings, whitened as well")
    return (
        Control("tf-idf", f"{TF_IDF}, mean", "tf-idf, without any model"),
        Control("bag", f"{BAG}, mean", "the bag of input embeddings"),
        *([bag] if name == "A, whitened" else []),
        Control("random", f"Random weights, {name}, mean", "itself on random weights"),
    )


def says(
    right: dict[str, float], task: Measure = TASK, items: int = 200, resampled: bool = True, chosen: str = ""
) -> str:
    """The verdict on recipes with such shares of the items, the first ones, right."""
    scores = {f"{name}, mean": (np.arange(items) < share * items).astype(float) for name, share in right.items()}
    statistic = bootstrap.mean(scores)
    beaten = [f"{name}, mean" for name in CONTROLS if name in right]
    found = bootstrap.estimate(statistic, controls=beaten, greater_is_better=task.greater_is_better)
    results = [
        Result(
            name,
            "mean",
            name in CONTROLS,
            {task.name: found[f"{name}, mean"]},
            called=CONTROLS.get(name, ""),
            controls=() if name in CONTROLS else controls(name),
        )
        for name in right
    ]
    return " ".join(verdict(Standing(results, task, statistic if resampled else None), chosen))


def test_a_clear_winner():
    text = says({BAG: 0.2, RANDOM_A: 0.1, RANDOM_B: 0.3, "A": 0.9, "B": 0.5})
    assert "Best on STS: A, mean, 90.0 [" in text
    assert "Every other recipe is told apart from it on this data." in text
    assert "It beats the strongest control of all, B, mean on random weights (30.0 [" in text
    assert "It beats the bag of input embeddings (20.0 [" in text
    assert "It beats itself on random weights (10.0 [" in text
    assert "Not ahead" not in text
    assert "No recipe" not in text


def test_a_score_that_chose_is_called_one():
    selected = "A score that chose among 2 recipes is likely too high: on other texts expect less."
    assert selected in says({BAG: 0.2, "A": 0.9, "B": 0.5})
    assert "likely too high" not in says({BAG: 0.2, "A": 0.9})
    assert "likely too high" not in says({BAG: 0.2, "A": 0.9, "B": 0.5}, chosen="A, mean")
    proxy = Measure("Loss", "loss", scale=1.0, greater_is_better=False, proxy=True)
    assert "likely too high" not in says({BAG: 0.1, "A": 0.6, "B": 0.4}, proxy)


def test_what_was_chosen_before_stands_whatever_is_ahead_now():
    text = says({BAG: 0.2, RANDOM_A: 0.1, RANDOM_B: 0.3, "A": 0.9, "B": 0.5}, chosen="B, mean")
    assert "Chosen before these scores were known: B, mean, 50.0 [" in text
    assert "A, mean is ahead of it here by 40.0 [" in text
    assert "It was not chosen: to take it now would be to choose by these scores." in text
    assert "It beats the strongest control of all, B, mean on random weights (30.0 [" in text
    assert "It beats the bag of input embeddings (20.0 [" in text
    assert "Best on" not in text
    close = says({"A": 0.51, "B": 0.505}, chosen="B, mean")
    assert "which cannot be told from 0. It was not chosen" in close
    same = says({BAG: 0.2, "A": 0.9, "B": 0.5}, chosen="A, mean")
    assert "Chosen before these scores were known: A, mean, 90.0 [" in same
    assert "ahead of it here" not in same


def test_what_is_tied_and_what_cannot_be_told():
    text = says({BAG: 0.585, RANDOM_A: 0.585, RANDOM_B: 0.7, "A": 0.59, "B": 0.585})
    assert "On this data, the other recipe cannot be told from it" in text
    assert "It is not surely ahead of the bag of input embeddings" in text
    assert "cannot be told from 0." in text
    assert "1 of the 2 other recipes cannot be told from it" in says({"A": 0.59, "B": 0.585, "C": 0.1})
    assert "Not ahead of the bag of input embeddings: B, mean." not in text or "B, mean" in text
    assert "Not ahead of themselves on random weights: B, mean." in text


def test_when_no_recipe_beats_a_control():
    text = says({BAG: 0.9, RANDOM_A: 0.8, RANDOM_B: 0.2, "A": 0.5, "B": 0.4})
    assert "The strongest control of all wins: the bag of input embeddings (90.0 [" in text
    assert "No recipe beats the bag of input embeddings." in text
    assert "It does not beat itself on random weights (80.0 [" in text
    assert "Not ahead of themselves on random weights: A, mean." in text


def test_equal_to_a_control_is_not_ahead_of_it():
    assert "Not ahead of the bag of input embeddings: B, mean." in says({BAG: 0.5, "A": 0.6, "B": 0.5})


def test_equal_figures_are_equal():
    """As in the answer: 60.2 is not ahead of 60.2."""
    text = says({BAG: 0.6018, "A": 0.6022, "B": 0.5}, items=10_000)
    assert "It does not beat the strongest control of all, the bag of input embeddings (60.2 [" in text
    assert "No recipe beats the bag of input embeddings." in text
    assert "ahead of" not in text.replace("the others", "")


def test_a_filtered_recipe_is_held_against_the_filtered_bag():
    text = says({BAG: 0.2, BAG_WHITENED: 0.95, "A, whitened": 0.9, "A": 0.5})
    assert "It beats the bag of input embeddings (20.0 [" in text
    assert "The strongest control of all wins: the bag of input embeddings, whitened (95.0 [" in text
    assert "Not ahead of the bag of input embeddings behind the same filter: A, whitened, mean." in text


def test_one_that_beats_the_plain_bag_is_not_said_to_beat_none():
    text = says({BAG: 0.2, BAG_WHITENED: 0.95, "A, whitened": 0.9, "A": 0.1})
    assert "It beats the bag of input embeddings (20.0 [" in text
    assert "No recipe beats the bag of input embeddings behind the same filter." in text


def test_less_is_better():
    task = Measure("Loss", "loss", scale=1.0, greater_is_better=False, proxy=True)
    text = says({BAG: 0.1, "A": 0.6, "B": 0.4}, task)
    assert "There are no labels here, so these are proxies" in text
    assert "Lowest on Loss: B, mean, 0.400 [" in text
    assert "No recipe beats the bag of input embeddings." in text


def test_without_anything_to_resample():
    text = says({BAG: 0.2, "A": 0.9}, resampled=False)
    assert "It is not surely ahead of the strongest control of all, the bag of input embeddings" in text
    assert "cannot be told from 0." in text


@pytest.mark.parametrize(
    ("control", "name"),
    [
        (TF_IDF, "tf-idf, without any model"),
        (BAG, "the bag of input embeddings"),
        (BAG_WHITENED, "the bag of input embeddings, whitened"),
        (RANDOM_BAG, "the bag of random embeddings, whitened"),
        (RANDOM_B, "B, mean on random weights"),
    ],
)
def test_the_strongest_control_of_all(control, name):
    """Behind any filter, also one that the best recipe does not have; first among the controls, and once."""
    others = {other: 0.3 for other in CONTROLS if other != control}
    wins = says({**others, control: 0.8, "A": 0.6, "B": 0.5})
    assert f"The strongest control of all wins: {name} (80.0 [" in wins
    assert "is ahead of it by 20.0 [" in wins
    level = says({**others, control: 0.6, "A": 0.6, "B": 0.5})
    assert f"It does not beat the strongest control of all, {name} (60.0 [" in level
    assert "the difference is 0.0 [0.0, 0.0]." in level
    close = says({**others, control: 0.595, "A": 0.6, "B": 0.5})
    assert f"It is not surely ahead of the strongest control of all, {name} (59.5 [" in close
    beaten = says({**others, control: 0.4, "A": 0.6, "B": 0.5})
    assert f"It beats the strongest control of all, {name} (40.0 [" in beaten
    for text in (wins, level, close, beaten):
        assert text.count(f"{name} (") == 1
        assert text.index("strongest control") < text.index("It beats itself on random weights")


def test_what_tf_idf_is_ahead_of():
    assert "Not ahead of tf-idf: B, mean." in says({TF_IDF: 0.55, BAG: 0.2, "A": 0.6, "B": 0.5})
    assert "No recipe beats tf-idf." in says({TF_IDF: 0.65, BAG: 0.2, "A": 0.6, "B": 0.5})


@pytest.mark.parametrize("value", [nan])
def test_no_number_at_all(value):
    results = [Result("A", "mean", False, {"STS": bootstrap.Estimate(value, value, value)})]
    assert verdict(Standing(results, TASK, None)) == ["No recipe has a number on STS."]
