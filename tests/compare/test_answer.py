"""The answer: its one subject, what it is surely ahead of, and the command that builds it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from st_reba.compare.answer import answer_of, build_command, headline, reasons
from st_reba.compare.results import Comparison, Result
from st_reba.compare.splits import Splits
from st_reba.data.tables import Pairs
from st_reba.evaluation.bootstrap import Replicated, mean
from st_reba.evaluation.tasks import Measure

TASK = Measure("STS", "Spearman x 100", unit="labelled pairs")
MEAN, LAST, PROMPT, ECHO, REBA = "Classical, mean", "Classical, last", "PromptEOL, last", "Echo-2, mean", "ReBA-2, mean"
TF_IDF, BAG, RANDOM = "tf-idf, mean", "Bag of input embeddings, mean", f"Random weights, {PROMPT}"
CONTROLS = {TF_IDF, BAG, RANDOM}
COUNT = 400
LEFT, RIGHT = ([f"{side} {number}" for number in range(COUNT)] for side in "ab")
SPLITS = Splits.of(Pairs(LEFT, RIGHT, [float(number) for number in range(COUNT)]))


def answered(right, costs=None, sure=True, margin=0.01, noise=0.0):
    """The answer where each row has such a share of the items right, the same ones, but for some at random."""
    draw, scores = np.random.default_rng(0), {}
    for name, share in right.items():
        own = np.where(np.arange(COUNT) < share * COUNT, 1.0, 0.0)
        swapped = draw.permutation(COUNT)[: int(noise * COUNT)]
        own[swapped] = own[draw.permutation(swapped)]
        scores[name] = draw.permuted(own) if noise == 1 else own
    items = mean(scores)
    own = right.keys() - CONTROLS - {MEAN, LAST}
    replicated = Replicated(
        dict(zip(items.values, items.scores, strict=True)),
        dict(zip(items.values, items.replicates, strict=True)), "mean", COUNT, own, sure,
    )  # fmt: skip
    estimates = replicated.estimates()
    results = [
        Result(*name.rsplit(", ", 1), name in CONTROLS, {TASK.name: estimates[name]}, cost=(costs or {}).get(name))
        for name in right
    ]
    found = answer_of(results, TASK, replicated, margin)
    # What is saved is the subject of the answer.
    saved = Comparison("m", "d", [TASK], results, use=found.use).choice().recipe
    assert re.search(rf"(Use|Keep|The best is|: the best,) {saved} \(", headline(found, TASK))
    return found, headline(found, TASK), " ".join(reasons(found, TASK, SPLITS, len(own)))


SCORE = r"[\d.]+ \[[\d.]+, [\d.]+\]"
FIRST = rf"PromptEOL \(last token\): {SCORE}(\.|, [\d.]+ before the correction for being the best of \d)"


@pytest.mark.parametrize(
    ("right", "use", "line", "why"),
    [
        # Of the two embeddings without a recipe the better one counts.
        (
            {BAG: 0.1, RANDOM: 0.2, MEAN: 0.3, LAST: 0.4, PROMPT: 0.7, ECHO: 0.5}, PROMPT,
            r"Use PromptEOL \(last token\): 70\.0, against 40\.0 without a recipe\.",
            r"Without a recipe you have the last token's hidden state\. The recipe is 30\.0 above it\. It is surely "
            r"ahead of every control\. Intervals are 95% for all rows at once\. These 400 labelled pairs can tell",
        ),
        (
            {TF_IDF: 0.8, BAG: 0.1, MEAN: 0.3, PROMPT: 0.7}, PROMPT,
            r"Use PromptEOL \(last token\): 70\.0, against 30\.0 without a recipe, but not surely ahead of the control "
            r"\"tf-idf\" \(80\.0\)\.",
            r"It is not surely ahead of the control \"tf-idf\"\.",
        ),
        (
            {BAG: 0.9, MEAN: 0.7, LAST: 0.2, PROMPT: 0.6}, "",
            r"Keep Classical \(mean\), which needs no recipe: 70\.0\. The best recipe, PromptEOL \(last token\), has "
            r"60\.0\.",
            r"Without a recipe you have the mean of the last hidden states\. It is not surely ahead of the control",
        ),
        (
            {TF_IDF: 0.8, BAG: 0.9, PROMPT: 0.5, MEAN: 0.5, LAST: 0.2}, "",
            r"None is surely ahead of the 50\.0 that you have without a recipe: the best, PromptEOL \(last token\), "
            r"has 50\.0\.",
            r"the last hidden states\. It is not surely ahead of the control \"Bag of input embeddings\", "
            r"nor of 1 other control\.",
        ),
        ({PROMPT: 0.6, ECHO: 0.4}, "", r"The best is PromptEOL \(last token\): 60\.0\. Nothing without a recipe was "
            r"compared\.", r"No control was run beside it\."),
    ],
)  # fmt: skip
def test_the_answer(right, use, line, why):
    found, head, said = answered(right)
    assert found.use == use
    assert re.fullmatch(line, head), head
    assert re.match(FIRST, said), said
    assert re.search(why, said), said
    # The answer's score and interval are those of its row.
    assert found.score == found.best.scores[TASK.name]


def test_equal_recipes_are_corrected_and_none_is_used():
    right = {f"R{row}, mean": 0.5 for row in range(8)} | {MEAN: 0.5}
    found, head, said = answered(right, noise=1)
    assert found.use == ""
    assert found.score.corrected < found.score.value
    assert re.search(rf": the best, R\d \(mean\), has {TASK.show(found.score.corrected)}\.$", head)
    assert f"{TASK.show(found.score.value)} before the correction for being the best of 8 recipes" in said
    assert "above it" not in said


@pytest.mark.parametrize(
    ("costs", "share", "margin", "cheaper"),
    [
        ({PROMPT: 2.0, ECHO: 1.5, REBA: 1.2}, 0.695, 0.05, REBA),
        # Not clearly cheaper; surely further behind than the margin, or perhaps.
        ({PROMPT: 2.0, ECHO: 1.9, REBA: 1.85}, 0.695, 0.05, None),
        ({PROMPT: 2.0, ECHO: 1.5, REBA: 1.2}, 0.6, 0.05, None),
        ({PROMPT: 2.0, ECHO: 1.5, REBA: 1.2}, 0.695, 0.001, None),
        ({}, 0.695, 0.05, None),
    ],
)
def test_a_cheaper_recipe_is_as_good_where_it_is_surely_within_the_margin(costs, share, margin, cheaper):
    found, _, said = answered({MEAN: 0.2, PROMPT: 0.7, ECHO: share, REBA: share}, costs, margin=margin)
    assert (found.best.name, found.cheaper and found.cheaper.name) == (PROMPT, cheaper)
    as_good = f"ReBA-2 (mean) is as good: it takes 60% of the time and is surely less than {TASK.show(margin)} behind."
    assert (as_good in said) == (cheaper is not None)


def test_where_nothing_is_sure_nothing_is_ahead():
    found, head, said = answered({BAG: 0.1, MEAN: 0.1, PROMPT: 0.9}, sure=False)
    assert (found.use, len(found.others), found.score.corrected) == ("", found.controls, None)
    assert head.startswith("None is surely ahead of the 10.0 that you have without a recipe: the best, PromptEOL")
    assert said.startswith("PromptEOL (last token): 90.0. The score is the mean over 5 splits: ")
    assert "can tell" not in said


def test_the_command_that_builds_a_recipe():
    """The texts to fit on would choose the language of the prompt."""
    result, texts = Result("any", "mean", False, {}, spec="early-late"), {"--fit-texts": "my texts.txt"}
    expected = "--recipe early-late --fit-texts 'my texts.txt' --prompt-language en --out my-early-late"
    assert build_command(result, {"--model": "a model"}, texts) == f"st-reba build --model 'a model' {expected}"
    last = build_command(Result("any", "last", False, {}, spec="reba-2"), {"--model": "m", "--dtype": None}, texts)
    assert last == "st-reba build --model m --recipe reba-2 --pooling last --out my-reba-2"
    parts = Result("any", "mean", False, {}, spec="early-late@9", template="{text} x", part_weights=(2 / 3, 1 / 3))
    found = build_command(parts, {"--model": "m"}, prompts={"query": "find: ", "document": "text: "})
    assert found == (
        "st-reba build --model m --recipe early-late@9 --template '{text} x' --shares 2,1 --query-prompt 'find: ' "
        "--document-prompt 'text: ' --out my-early-late"
    )
