from __future__ import annotations

import re
import shlex
from math import nan
from typing import NamedTuple

import numpy as np
import pytest

from st_reba.compare.answer import Standing, answer, build_command
from st_reba.compare.results import Result
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure

TASK = Measure("STS", "Spearman x 100", unit="labelled pairs")
BAG, RANDOM = "Bag of input embeddings, mean", "Random weights, PromptEOL, last"
CALLED = {BAG: "the bag of input embeddings", RANDOM: "PromptEOL, last on random weights"}
MEAN, LAST, PROMPT, ECHO = "Classical, mean", "Classical, last", "PromptEOL, last", "Echo-2, mean"


class Answer(NamedTuple):
    says: str
    use: str


def found(right, task=TASK, resampled=True, chosen="", costs=None, seed=None, drawn=None):
    """The answer on recipes with such shares of 200 items right: the first ones, or drawn ones."""
    draw = np.random.default_rng(seed)
    scores = {name: (np.arange(200) < share * 200).astype(float) for name, share in right.items()}
    if seed is not None:
        scores |= {name: draw.permutation(scores[name]) for name in drawn or scores}
    statistic = bootstrap.mean(scores)
    controls = [name for name in (BAG, RANDOM) if name in right]
    estimates = bootstrap.estimate(statistic, controls=controls, greater_is_better=task.greater_is_better)
    results = [
        Result(
            recipe,
            pooling,
            name in controls,
            {task.name: estimates[name]},
            cost=(costs or {}).get(name),
            called=CALLED.get(name, ""),
        )
        for name in right
        for recipe, pooling in [name.rsplit(", ", 1)]
    ]
    return Answer(*answer(Standing(results, task, statistic if resampled else None), chosen))


def says(*arguments, **settings) -> str:
    return found(*arguments, **settings).says


def test_what_to_use():
    right = {BAG: 0.1, RANDOM: 0.2, MEAN: 0.3, LAST: 0.4, PROMPT: 0.7, ECHO: 0.5}
    # Of the two that one has without a recipe the better one counts.
    pattern = (
        r"Use PromptEOL, last token: 70\.0 \[6\d\.\d, 7\d\.\d\], 30 above what you have "
        r"\(the last token's hidden state\), ahead of every control\."
    )
    assert re.fullmatch(pattern, says(right))
    assert found(right).use == PROMPT
    assert says({PROMPT: 0.6, ECHO: 0.4}).endswith("], and no control was run beside it.")


def test_small_differences_have_a_decimal():
    assert ", 9.5 above what you have (the mean of the last hidden states), ahead" in says(
        {BAG: 0.1, MEAN: 0.4, PROMPT: 0.495}
    )


@pytest.mark.parametrize(("control", "called"), CALLED.items())
def test_none_where_a_control_scores_as_high(control, called):
    ahead = found({control: 0.8, MEAN: 0.3, PROMPT: 0.5})
    assert ahead.says == (
        f"None: no recipe beats {called} (80.0); the best, PromptEOL, last token, has 50.0. More labelled pairs will "
        "hardly change that; a bigger model may."
    )
    assert ahead.use == ""
    # The same on every item: no number of pairs tells them apart.
    assert says({control: 0.7, MEAN: 0.3, PROMPT: 0.7}).endswith(
        "has 70.0. A bigger model, or more labelled pairs, will say more."
    )


def test_how_many_more_would_tell():
    """From the paired interval by the square-root law, to one digit."""
    right = {BAG: 0.56, MEAN: 0.3, PROMPT: 0.5}
    text = says(right, seed=1)
    about = re.search(r"or more labelled pairs \(by the interval about ([\d,]+) more would do\), will say more", text)
    # Two scores that do not depend on each other: 1.96 standard errors of their difference are half the interval.
    half = 1.96 * np.sqrt((0.56 * 0.44 + 0.5 * 0.5) / 200)
    expected = 200 * (1.43 * half / 0.06) ** 2 - 200
    assert float(about[1].replace(",", "")) == pytest.approx(expected, rel=0.35)
    assert len(about[1].replace(",", "").rstrip("0")) == 1


def test_a_control_that_cannot_be_told_from_it_is_named():
    text = says({BAG: 0.48, MEAN: 0.2, PROMPT: 0.5}, seed=3)
    assert "not surely ahead of the bag of input embeddings (48.0). A bigger model, or more labelled pairs" in text
    assert text.startswith("Use PromptEOL, last token: 50.0 [")


def test_none_where_what_one_has_is_as_good():
    close = found({MEAN: 0.5, LAST: 0.4, PROMPT: 0.505})
    assert close.says.startswith(
        "None: the best, PromptEOL, last token, has 50.5, and cannot be told from what you have, the mean of the last "
        "hidden states (50.0). A bigger model, or more labelled pairs (by the interval about "
    )
    assert close.use == ""
    behind = says({BAG: 0.1, MEAN: 0.6, LAST: 0.4, PROMPT: 0.5})
    assert behind == (
        "None: no recipe is ahead of what you have, the mean of the last hidden states (60.0). More labelled pairs "
        "will hardly change that; a bigger model may."
    )
    assert says({MEAN: 0.6}) == "None: no recipe is ahead of what you have, the mean of the last hidden states (60.0)."


def close(scores, chosen=""):
    """The answer on scores of which nothing is resampled."""
    results = [
        Result(*name.rsplit(", ", 1), name in CALLED, {"STS": Estimate(score, nan, nan)}, called=CALLED.get(name, ""))
        for name, score in scores.items()
    ]
    return Answer(*answer(Standing(results, TASK, None), chosen))


@pytest.mark.parametrize("control", CALLED)
def test_what_shows_the_same_figure_as_a_control_is_not_advised(control):
    """Nobody sees what a 60.2 is ahead of a 60.2 by."""
    level = close({control: 0.60196, PROMPT: 0.60204})
    assert level.says.startswith(
        f"None: no recipe beats {CALLED[control]} (60.2); the best, PromptEOL, last token, has 60.2"
    )
    assert level.use == ""
    assert close({control: 0.6014, PROMPT: 0.60204}).use == PROMPT


def test_what_shows_the_same_figure_as_what_one_has_is_not_advised():
    level = close({MEAN: 0.60196, PROMPT: 0.60204})
    assert level.says.startswith(
        "None: the best, PromptEOL, last token, has 60.2, level with what you have, the mean of the last hidden states "
        "(60.2). "
    )


def test_a_choice_that_a_control_beats_is_no_word_on_the_others():
    text = says({BAG: 0.425, MEAN: 0.3, PROMPT: 0.42, ECHO: 0.836}, chosen=PROMPT)
    assert text.startswith(
        "None: PromptEOL, last token, which was chosen, has 42.0 and does not beat the bag of input embeddings (42.5)."
    )
    assert says({BAG: 0.9, MEAN: 0.3, PROMPT: 0.42, ECHO: 0.836}, chosen=PROMPT).startswith("None: no recipe beats")


def test_a_choice_without_a_recipe_is_no_word_on_the_others():
    assert says({MEAN: 0.4, PROMPT: 0.6}, chosen=MEAN) == (
        "None: Classical, mean, which was chosen, is what you have, the mean of the last hidden states (40.0)."
    )


def test_another_is_advised_where_the_best_cannot_be_told():
    """The best is ahead of what one has by chance as it seems; another one by less, on the same items, and surely."""
    right = {BAG: 0.1, MEAN: 0.5, ECHO: 0.54, PROMPT: 0.555}
    text = says(right, seed=2, drawn=[PROMPT])
    assert re.fullmatch(
        r"Use Echo-2, mean: 54\.0 \[.*\], 4\.0 above what you have \(the mean of the last hidden states\), ahead of "
        r"every control\. The best, PromptEOL, last token, has 56\.0, and cannot be told from what you have\.",
        text,
    )
    assert found(right, seed=2, drawn=[PROMPT]).use == ECHO
    # Not where a control is ahead of that.
    assert says({**right, BAG: 0.545}, seed=2, drawn=[PROMPT]).startswith("None: the best, PromptEOL, last token,")
    # What was chosen before stays chosen.
    chosen = says(right, seed=2, drawn=[PROMPT], chosen=PROMPT)
    assert chosen.startswith("None: the best, PromptEOL, last token, has 56.0, and cannot be told from what you have")


class TestTies:
    RIGHT = {BAG: 0.1, MEAN: 0.2, PROMPT: 0.6, ECHO: 0.595, "ReBA-2, mean": 0.595}

    def test_the_cheapest_is_advised(self):
        costs = {PROMPT: 2.0, ECHO: 1.5, "ReBA-2, mean": 1.2}
        both = found(self.RIGHT, costs=costs)
        assert both.says.startswith("Three recipes cannot be told apart; use the cheapest, ReBA-2, mean: 59.5 [")
        assert both.says.endswith(" above what you have (the mean of the last hidden states), ahead of every control.")
        assert both.use == "ReBA-2, mean"

    def test_a_few_percent_of_time_are_no_difference(self):
        costs = {PROMPT: 2.0, ECHO: 1.95, "ReBA-2, mean": 1.9}
        text = says(self.RIGHT, costs=costs)
        assert text.startswith("Use PromptEOL, last token: 60.0 [")
        assert text.endswith("ahead of every control. Two other recipes cannot be told from it.")
        assert says(self.RIGHT).startswith("Use PromptEOL")

    def test_a_cheap_one_that_a_control_equals_is_not(self):
        right = {BAG: 0.594, MEAN: 0.2, PROMPT: 0.6, ECHO: 0.59}
        assert found(right, costs={PROMPT: 2.0, ECHO: 1.0}).use == PROMPT

    def test_what_was_chosen_stays_chosen(self):
        costs = {PROMPT: 2.0, ECHO: 1.5, "ReBA-2, mean": 1.2}
        chosen = found(self.RIGHT, costs=costs, chosen=ECHO)
        assert chosen.says.startswith("Use Echo-2, mean: 59.5 [")
        assert chosen.use == ECHO


def test_what_was_chosen_before_is_what_it_is_about():
    worse = says({MEAN: 0.4, PROMPT: 0.2, ECHO: 0.7}, chosen=PROMPT)
    assert worse == (
        "None: PromptEOL, last token, which was chosen, has 20.0, behind what you have, the mean of the last hidden "
        "states (40.0). More labelled pairs will hardly change that; a bigger model may."
    )


def test_where_less_is_better_less_is_ahead():
    task = Measure("Loss", "loss", scale=1.0, greater_is_better=False)
    text = says({BAG: 0.9, MEAN: 0.7, PROMPT: 0.4, ECHO: 0.5}, task)
    assert text.startswith("Use PromptEOL, last token: 0.400 [0.3")
    assert text.endswith("], 0.300 below what you have (the mean of the last hidden states), ahead of every control.")


def test_nothing_that_can_be_resampled_is_not_sure():
    text = says({MEAN: 0.4, PROMPT: 0.6}, resampled=False)
    assert text == (
        "None: the best, PromptEOL, last token, has 60.0, and cannot be told from what you have, the mean of the last "
        "hidden states (40.0). A bigger model, or more labelled pairs, will say more."
    )


def test_proxies_are_no_answer():
    task = Measure("Loss", "loss", scale=1.0, greater_is_better=False, proxy=True)
    assert says({MEAN: 0.4, PROMPT: 0.6}, task).startswith("Without labels there is no answer")


def test_no_number_is_no_answer():
    results = [Result("Classical", "mean", False, {"STS": Estimate(nan, nan, nan)})]
    assert answer(Standing(results, TASK, None))[0] == "There is no answer: no recipe has a number on STS."


@pytest.mark.parametrize(
    ("values", "labels", "why"),
    [
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], "All labelled pairs look the same to every recipe, as where all texts are"),
        ([0.1, 0.2, 0.3], [2.0, 2.0, 2.0], "All labels are alike: give labelled pairs whose labels differ."),
        ([nan, nan, nan], [1.0, 2.0, 3.0], "All similarities are not a number: in float16 large activations overflow"),
    ],
)
def test_why_there_is_no_number(values, labels, why):
    statistic = bootstrap.spearman({"Classical, mean": values}, labels)
    results = [Result("Classical", "mean", False, {"STS": Estimate(nan, nan, nan)})]
    said = answer(Standing(results, TASK, statistic))[0]
    assert said.startswith(f"There is no answer: no recipe has a number on STS. {why}")


@pytest.mark.parametrize(
    ("spec", "pooling", "expected"),
    [
        ("prompteol", "last", "--recipe prompteol --out my-model"),
        ("reba-2", "mean", "--recipe reba-2 --out my-model"),
        ("reba-2", "last", "--recipe reba-2 --pooling last --out my-model"),
        ("classical+whitened", "mean", "--recipe classical+whitened --fit-texts 'my texts.txt' --out my-model"),
        # The texts to fit on would choose the language of the prompt.
        (
            "early-late",
            "mean",
            "--recipe early-late --fit-texts 'my texts.txt' --prompt-language en --out my-model",
        ),
        ("early-late-zh", "mean", "--recipe early-late-zh --fit-texts 'my texts.txt' --out my-model"),
    ],
)
def test_what_to_type(spec, pooling, expected):
    command = build_command(Result("any", pooling, False, {}, spec=spec), "a model", "my texts.txt")
    assert command == f"st-reba build --model 'a model' {expected}"
    longest = build_command(Result("any", pooling, False, {}, spec=spec), "m", None, 64)
    assert shlex.split(longest)[-4:] == ["--max-seq-length", "64", "--out", "my-model"]


def test_what_to_type_has_the_prompts():
    line = build_command(
        Result("any", "mean", False, {}, spec="reba-2"), "m", prompts={"query": "find: ", "document": "text: "}
    )
    assert line.endswith("--query-prompt 'find: ' --document-prompt 'text: ' --out my-model")
