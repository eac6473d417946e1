"""What a comparison says: the answer, and the sentences under it."""

from __future__ import annotations

import re
from math import nan

import numpy as np
import pytest

from st_reba.compare.answer import Standing, answer, build_command, verdict
from st_reba.compare.results import Result
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure
from st_reba.recipes import Control

TASK = Measure("STS", "Spearman x 100", unit="labelled pairs")
MEAN, LAST, PROMPT, ECHO, REBA = "Classical, mean", "Classical, last", "PromptEOL, last", "Echo-2, mean", "ReBA-2, mean"
TF_IDF, BAG, WHITE = "tf-idf, mean", "Bag of input embeddings, mean", "Bag of input embeddings, whitened, mean"
RANDOM, RANDOM_BAG = f"Random weights, {PROMPT}", f"Random weights, {WHITE}"
#: The controls, and what they are called in a sentence.
CALLED = {
    TF_IDF: "tf-idf, without any model",
    BAG: "the bag of input embeddings",
    WHITE: "the bag of input embeddings, whitened",
    RANDOM_BAG: "the bag of random embeddings, whitened",
    RANDOM: "PromptEOL, last on random weights",
}


def controls(name: str) -> tuple[Control, ...]:
    """What a recipe is to be held against; of those whose names say so, behind a filter, too."""
    filtered = Control("filtered bag", WHITE, "the bag of input embeddings, whitened as well")
    return (
        Control("tf-idf", TF_IDF, CALLED[TF_IDF]),
        Control("bag", BAG, CALLED[BAG]),
        *([filtered] if "whitened" in name else []),
        Control("random", f"Random weights, {name}", "itself on random weights"),
    )


def table(right, costs=None, seed=None, drawn=None, items=200) -> Standing:
    """Recipes with such scores: a share of the items is right, the first ones, or drawn ones."""
    draw = np.random.default_rng(seed)
    scores = {name: (np.arange(items) < share * items).astype(float) for name, share in right.items()}
    scores = {name: own + right[name] - own.mean() for name, own in scores.items()}
    if seed is not None:
        scores |= {name: draw.permutation(scores[name]) for name in drawn or scores}
    made = bootstrap.mean(scores)
    found = bootstrap.estimate(made, controls=right.keys() & CALLED)
    results = [
        Result(
            name.rpartition(", ")[0], name.rpartition(", ")[2], name in CALLED, {TASK.name: found[name]},
            cost=(costs or {}).get(name), called=CALLED.get(name, ""),
            controls=() if name in CALLED else controls(name),
        )
        for name in right
    ]  # fmt: skip
    return Standing(results, TASK, made)


def says(right, **settings) -> tuple[str, str]:
    """The answer and what it rests on, on a line each; and what to use."""
    found = answer(table(right, **settings))
    return "\n".join([found.says, *found.why]), found.use


HAVE = "Without a recipe you have the mean of the last hidden states."
WITHOUT = "that you have without a recipe"
CLOSE = {BAG: 0.1, MEAN: 0.5, ECHO: 0.54, PROMPT: 0.555}
BY_CHANCE = {"seed": 2, "drawn": [PROMPT]}
TIES = {BAG: 0.1, MEAN: 0.2, PROMPT: 0.6, ECHO: 0.595, REBA: 0.595}
CHEAP = {PROMPT: 2.0, ECHO: 1.5, REBA: 1.2}


@pytest.mark.parametrize(
    ("right", "settings", "use", "pattern"),
    [
        # Of the two that one has without a recipe the better one counts.
        (
            {BAG: 0.1, RANDOM: 0.2, MEAN: 0.3, LAST: 0.4, PROMPT: 0.7, ECHO: 0.5}, {}, PROMPT,
            r"Use PromptEOL \(last token\): 70\.0, against 40\.0 without a recipe\.\n"
            r"PromptEOL \(last token\): 70\.0 \[6\d\.\d, 7\d\.\d\]\.\n"
            r"Without a recipe you have the last token's hidden state\. The recipe is 30 above it\.\n"
            r"The recipe is ahead of every control\.",
        ),
        ({PROMPT: 0.6, ECHO: 0.4}, {}, PROMPT, r"Use PromptEOL \(last token\): 60\.0\.\n.*\]\.\nNo control was run "
            r"beside the recipe\."),
        (
            {BAG: 0.48, MEAN: 0.2, PROMPT: 0.5}, {"seed": 3}, PROMPT,
            r"Use PromptEOL \(last token\): 50\.0, against 20\.0 without a recipe, but not surely ahead of the bag of "
            r"input embeddings \(48\.0\)\.\n.*(more labelled pairs would tell|More labelled pairs, or) .*",
        ),
        (
            {MEAN: 0.5, LAST: 0.4, PROMPT: 0.505}, {}, "",
            rf"None: the best, PromptEOL \(last token\), has 50\.5, too close to the 50\.0 {WITHOUT}\.\n{HAVE}\n"
            r"The difference, 0\.5 \[.*\], cannot be told from 0\.\nBy the interval, about .* more labelled pairs "
            r"would tell which is ahead; a bigger model may, too\.",
        ),
        (
            {BAG: 0.1, MEAN: 0.6, LAST: 0.4, PROMPT: 0.5}, {}, "",
            rf"None: no recipe beats the 60\.0 {WITHOUT}\.\n{HAVE}\nMore labelled pairs will hardly change that; a "
            rf"bigger model may\.",
        ),
            # Another one is ahead by less, on the same items, and surely; but not of a control.
        (
            CLOSE, BY_CHANCE, ECHO,
            r"Use Echo-2 \(mean\): 54\.0, against 50\.0 without a recipe\.\n.* is 4\.0 above it\.\n.* ahead of every "
            rf"control\.\nThe best, PromptEOL \(last token\), has 55\.5, too close to the 50\.0 {WITHOUT}\.",
        ),
        # The cheapest of those that cannot be told apart, if it is clearly cheaper and no control equals it.
        (
            TIES, {"costs": CHEAP}, REBA,
            r"Use ReBA-2 \(mean\): 59\.5, against 20\.0 without a recipe\.\n.*\nThree recipes cannot be told apart; "
            r"this one is the cheapest\.\n.*\nThe recipe is ahead of every control\.",
        ),
        (TIES, {"costs": {PROMPT: 2.0, ECHO: 1.95, REBA: 1.9}}, PROMPT, r"Use Pro.*\nTwo other recipes cannot be .*"),
        # Not one that a control may equal, where the best is surely ahead of it.
        (
            {BAG: 0.5, MEAN: 0.2, PROMPT: 0.6, ECHO: 0.595, REBA: 0.57},
            {"costs": CHEAP, "seed": 2, "drawn": [REBA]}, ECHO,
            r"Use Echo-2 \(mean\): .*\nThree recipes .* this one is the cheapest of those that are surely ahead of "
            r"every control\..*",
        ),
    ],
)  # fmt: skip
def test_what_to_use(right, settings, use, pattern):
    text, found = says(right, **settings)
    assert re.fullmatch(pattern, text, re.DOTALL), text
    assert found == use


def test_none_where_a_control_scores_as_high():
    assert says({BAG: 0.8, MEAN: 0.3, PROMPT: 0.5})[0] == (
        f"None: no recipe beats {CALLED[BAG]} (80.0); the best, PromptEOL (last token), has 50.0.\nMore labelled "
        "pairs will hardly change that; a bigger model may."
    )
    # The same on every item: no number of pairs tells them apart.
    same, _ = says({RANDOM: 0.7, MEAN: 0.3, PROMPT: 0.7})
    assert same.endswith("has 70.0.\nMore labelled pairs, or a bigger model, may tell which is ahead.")
    # Nobody sees what a 60.2 is ahead of a 60.2 by.
    level, _ = says({BAG: 0.60196, PROMPT: 0.60204})
    assert level.startswith(f"None: no recipe beats {CALLED[BAG]} (60.2); the best, PromptEOL (last token), has 60.2")
    assert says({BAG: 0.6014, PROMPT: 0.60204})[1] == PROMPT
    have, _ = says({MEAN: 0.60196, PROMPT: 0.60204})
    assert have.startswith(f"None: the best, PromptEOL (last token), has 60.2, level with the 60.2 {WITHOUT}.")


@pytest.mark.parametrize(
    ("values", "labels", "why"),
    [
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], " All labelled pairs look the same to every recipe, as where all texts are"),
        ([0.1, 0.2, 0.3], [2.0, 2.0, 2.0], " All labels are alike: give labelled pairs whose labels differ."),
        ([nan, nan, nan], [1.0, 2.0, 3.0], " All similarities are not a number: in float16 large activations overflow"),
    ],
)
def test_no_number_is_no_answer(values, labels, why):
    made = bootstrap.spearman({MEAN: values}, labels)
    standing = Standing([Result("Classical", "mean", False, {"STS": Estimate(nan, nan, nan)})], TASK, made)
    assert answer(standing)[0].startswith(f"There is no answer: no recipe has a number on STS.{why}")
    assert verdict(standing) == ["No recipe has a number on STS."]


# The sentences under it


def told(right) -> str:
    return " ".join(verdict(table(right)))


WHITENED = "A, whitened, mean"


STRONGEST = "the strongest control of all"
CLEAR = {BAG: 0.2, RANDOM: 0.3, PROMPT: 0.9, ECHO: 0.5}


@pytest.mark.parametrize(
    ("right", "there"),
    [
        (
            CLEAR,
            ["Best on STS: PromptEOL, last, 90.0 [", "On this data every other recipe is surely worse.",
             "The best of 2 scores is likely too high: on other texts expect less.",
             f"PromptEOL (last token) beats {STRONGEST}, PromptEOL, last on random weights (30.0 [",
             "It beats the bag of input embeddings (20.0 [",
             "Only the best were run on random weights, too: PromptEOL, last."],
        ),
        (
            {BAG: 0.585, RANDOM: 0.59, PROMPT: 0.59, ECHO: 0.585},
            ["On this data the other recipe may be as good", "It is not surely ahead of the bag of input embeddings",
             "One of 2 recipes does not beat the bag of input embeddings: Echo-2, mean.", "None of these beats itself "
             "on"],
        ),
        (
            {BAG: 0.9, RANDOM: 0.8, PROMPT: 0.5, ECHO: 0.4},
            ["The strongest control of all wins: the bag of input embeddings (90.0 [",
             "No recipe beats the bag of input embeddings.", "PromptEOL (last token) does not beat itself on "
             "random weights (80.0 ["],
        ),
        # What stands behind a filter is held against the bag behind it.
        (
            {BAG: 0.2, WHITE: 0.95, WHITENED: 0.9, ECHO: 0.5},
            ["A, whitened (mean) beats the bag of input embeddings (20.0 [",
             "wins: the bag of input embeddings, whitened (95.0 [",
             "One of 2 recipes does not beat the bag of input embeddings behind the same filter: A, whitened, mean."],
        ),
    ],
)  # fmt: skip
def test_the_verdict(right, there):
    text = told(right)
    for sentence in there:
        assert sentence in text, text


def test_the_strongest_control_of_all():
    """Behind any filter, also one that the best recipe does not have; first among the controls, and once."""
    others = {other: 0.3 for other in CALLED if other != RANDOM_BAG}
    for share, start in (
        (0.6, f"PromptEOL (last token) does not beat {STRONGEST}, {CALLED[RANDOM_BAG]} (60.0 ["),
        (0.595, f"PromptEOL (last token) is not surely ahead of {STRONGEST}, {CALLED[RANDOM_BAG]} (59.5 ["),
    ):
        text = told({**others, RANDOM_BAG: share, PROMPT: 0.6, ECHO: 0.5})
        assert start in text
        assert text.count(f"{CALLED[RANDOM_BAG]} (") == 1
        assert text.index("strongest control") < text.index("It beats itself on random weights")


def test_the_advised_recipe_is_held_against_controls():
    """And not the best one, where a cheaper one is advised."""
    given = table(TIES, costs=CHEAP)
    advised = answer(given).use
    says = verdict(given, advised=advised)
    assert advised == REBA
    assert any(sentence.startswith("Best on STS: PromptEOL, last, 60.0 [") for sentence in says)
    assert any(sentence.startswith(f"ReBA-2 (mean) beats {STRONGEST}, the bag of input") for sentence in says)


# What to type


def test_what_to_type():
    """The texts to fit on would choose the language of the prompt."""
    result = Result("any", "mean", False, {}, spec="early-late")
    expected = "--recipe early-late --fit-texts 'my texts.txt' --prompt-language en --out my-early-late"
    assert build_command(result, "a model", "my texts.txt") == f"st-reba build --model 'a model' {expected}"
    last = build_command(Result("any", "last", False, {}, spec="reba-2"), "m", None)
    assert last.endswith("--recipe reba-2 --pooling last --out my-reba-2")
    longest = build_command(result, "m", None, 64, {"query": "find: ", "document": "text: "}, "bfloat16")
    prompts = "--query-prompt 'find: ' --document-prompt 'text: '"
    assert longest.endswith(f" --max-seq-length 64 --dtype bfloat16 {prompts} --out my-early-late")
