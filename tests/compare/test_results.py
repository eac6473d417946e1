"""A comparison is saved and read, also one of 0.8; as a table; beside an older one; and its answer."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from st_reba.compare.answer import answer_of, build_command, headline, reasons
from st_reba.compare.report import write_report
from st_reba.compare.results import Comparison, Result, SavedReplicates, best_of, listed, rank, rows, side_by_side
from st_reba.compare.splits import Splits
from st_reba.data.tables import Pairs
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Estimate, Replicated, mean
from st_reba.evaluation.tasks import Measure
from st_reba_cli.show import show

from . import samples

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAN = math.nan


@pytest.fixture
def comparison():
    # One with a control of its own.
    *others, first = samples.demo().results
    first = dataclasses.replace(first, cost=None)
    replicates = SavedReplicates("digest", {"Echo-2, mean": [0.125, 0.1, 1e-8]})
    return dataclasses.replace(samples.demo(), results=[first, *others[:2]], answer="是", replicates=replicates)


@pytest.fixture
def saved(comparison, tmp_path):
    """The path of a saved comparison, and what stands there."""
    comparison.save(tmp_path / "comparison.json")
    text = (tmp_path / "comparison.json").read_text(encoding="utf-8")
    return tmp_path / "comparison.json", text, json.loads(text)


def test_what_is_saved_is_loaded(comparison, saved):
    assert Comparison.load(saved[0]) == comparison


def test_what_is_no_number_is_null(tmp_path):
    path = tmp_path / "comparison.json"
    scores = {"A": Estimate(0.5, NAN, NAN, tied=True)}
    Comparison("m", "d", [Measure("A", "accuracy")], [Result("Echo-2", "mean", False, scores)]).save(path)
    text = path.read_text(encoding="utf-8")
    assert "NaN" not in text
    found = Comparison.load(path).results[0].scores["A"]
    assert (found.value, found.tied) == (0.5, True)
    assert math.isnan(found.low + found.high)


def places(value, path=()):
    """Every key of a file and the first of every list, with what stands there."""
    yield path, value
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def changed(whole, path, value):
    found = json.loads(json.dumps(whole))
    parent = found
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return json.dumps(found)


WRONG: list[object] = [None, -1, "x", True, [], [None], {"x": None}]


def test_whatever_a_file_holds_is_shown_or_refused_by_its_key(comparison, saved):
    """Each key takes a value of each wrong kind: one sentence, or a comparison that can be shown and held against."""
    path, _, whole = saved
    console, refused, read = Console(file=io.StringIO(), width=120), 0, 0
    for place, _ in list(places(whole))[1:]:
        named = ".".join(map(str, place))
        for value in WRONG:
            path.write_text(changed(whole, place, value), encoding="utf-8")
            try:
                found = Comparison.load(path)
            except ValueError as error:
                said = str(error)
                assert f"({named}" in said, said
                assert said.startswith(f"{path} is no comparison that st_reba"), said
                assert said.endswith("or run the comparison again.")
                assert "\n" not in said
                refused += 1
                continue
            read += 1
            show(found, to=console)
            with contextlib.suppress(ValueError):
                side_by_side(found, comparison)
    assert refused > 300
    assert 30 < read < refused


def test_what_is_no_comparison(tmp_path):
    path = tmp_path / "other.json"
    for text, said in (("[" * 100_000, "recursion limit exceeded"), ("[]", "Input should be an object")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"(?i)other.json is no comparison that st_reba [^ ]+ reads \(.*{said}"):
            Comparison.load(path)


def test_a_comparison_of_0_8_is_shown(tmp_path):
    """Its scores and its answer; what went since is ignored, and it is an older one to compare with."""
    found = Comparison.load(FIXTURES / "comparison-0.8.json")
    stream = io.StringIO()
    show(found, to=Console(file=stream, width=120))
    shown = stream.getvalue()
    assert shown.startswith("None: no recipe beats the bag of input embeddings (45.6); the best, chosen on one half")
    assert re.search(r"Echo-2 +mean +40\.5 +\[27, 52\] +6\.1 +32\.5", shown)
    assert "With --out, also: Beyond overlap; STS, Pearson." in shown
    assert (found.replicates, found.best().chosen) == (None, {})
    page = write_report(found, tmp_path / "out").read_text(encoding="utf-8")
    assert "How often each setting was chosen" not in page
    assert Comparison.load(tmp_path / "out" / "comparison.json") == found
    same = side_by_side(found, found)
    assert same.sentences[1] == "The intervals are not paired: one comparison has no replicates."
    assert all(change.difference.tied for change in same.changes)


@given(st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=9))
def test_replicates_are_kept_as_precisely_as_float32(values):
    assert SavedReplicates.of("d", {"a": values}).scores["a"] == [float(str(np.float32(value))) for value in values]


def test_the_best_recipe_and_the_rows_of_a_table():
    up = Measure("t", "accuracy")

    def made(name: str, value: float | None, tied: bool = False, control: bool = False) -> Result:
        return Result(name, "mean", control, {} if value is None else {"t": Estimate(value, NAN, NAN, tied)})

    results = [made("a", 0.2), made("b", NAN, True), made("c", 0.5, True), made("d", 0.5, True), made("e", None)]
    results += [made("g", 0.4, True), made("f", 0.9, True, control=True)]
    assert best_of(results, up).recipe == "c"
    assert best_of(results[1:2], up) is None
    assert [row.recipe for row in sorted(results, key=lambda row: rank(row, up))] == [*"fcdgabe"]
    assert [row.result.recipe for row in rows(Comparison("m", "d", [up], results))] == [*"cdgabef"]
    assert [listed(names, "recipes") for names in ("abc", "abcd")] == ["a; b; c", "4 recipes"]


# Beside an older one

TASK = Measure("STS", "accuracy x 100", unit="labelled pairs")
HARD = np.random.default_rng(9).random(400)


def shares(right: dict[str, float], seed: int = 0, drawn_from: str = "the data") -> Comparison:
    """Recipes that get such shares of the items right."""
    noise = 0.05 * np.random.default_rng(seed).standard_normal(400)
    items = bootstrap.mean({f"{name}, mean": (HARD + noise < share) * 1.0 for name, share in right.items()})
    found = bootstrap.estimate(items)
    results = [Result(name, "mean", False, {"STS": found[f"{name}, mean"]}) for name in right]
    drawn = SavedReplicates.of(drawn_from, dict(zip(items.values, items.replicates, strict=True)))
    return Comparison("model", "pairs", [TASK], results, replicates=drawn, use="A, mean")


def test_paired_differences_see_what_others_do_not():
    old, new = shares({"A": 0.5, "B": 0.6}, 1), shares({"A": 0.56, "B": 0.6, "C": 0.9}, 2)
    paired = side_by_side(new, old)
    assert [change.name for change in paired.changes] == ["A, mean", "B, mean"]
    first, second = (change.difference for change in paired.changes)
    assert 0 < first.low < first.value < first.high
    assert (first.tied, second.tied) == (False, True)
    assert paired.sentences[0].startswith("1 of 2 results changed beyond the interval, most of all A, mean by +")
    same = "The intervals are paired: both comparisons are of the same labelled pairs."
    assert paired.sentences[1:] == [same, "To use: A, mean, as before."]
    others = dataclasses.replace(old.replicates, drawn_from="others")
    apart = side_by_side(new, dataclasses.replace(old, replicates=others, use=""))
    # The same difference, much less sure: the items are no longer the same.
    assert apart.changes[0].difference.tied
    assert apart.sentences[0].startswith("Nothing changed beyond the interval, of 2 results; most of all A, mean by +")
    assert apart.sentences[1].startswith("The intervals are not paired: the labelled pairs or their splits differ")
    assert apart.sentences[2] == "To use: A, mean; before: none."


def test_intervals_of_two_samples():
    """Half-widths of both intervals, each on its side and around a corrected score, add up by their squares."""
    old, new = (dataclasses.replace(shares({"A": share}), replicates=None) for share in (0.5, 0.6))
    score = dataclasses.replace(new.results[0].scores["STS"], corrected=0.58)
    new = dataclasses.replace(new, results=[dataclasses.replace(new.results[0], scores={"STS": score})])
    (change,) = side_by_side(new, old).changes
    low = math.hypot(0.58 - change.new.low, change.old.high - change.old.value)
    assert change.difference.value == pytest.approx(change.new.value - change.old.value)
    assert change.difference.value - change.difference.low == pytest.approx(low)
    # Nothing is told where there is no interval.
    results = [Result("A", "mean", False, {"STS": Estimate(0.9, NAN, NAN)})]
    assert side_by_side(dataclasses.replace(new, results=results), old).changes[0].difference.tied


def test_what_cannot_be_held_against_each_other():
    new = shares({"A": 0.5})
    with pytest.raises(ValueError, match="have no recipe in common: the old one has Z, mean."):
        side_by_side(new, shares({"Z": 0.5}))
    said = r"by STS \(accuracy x 100\), the old one by NLI \(accuracy x 100\): compare on the same kind of data"
    with pytest.raises(ValueError, match=said):
        side_by_side(new, dataclasses.replace(new, tasks=[Measure("NLI", "accuracy x 100")]))


STS = Measure("STS", "Spearman x 100", unit="labelled pairs")
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
        Result(*name.rsplit(", ", 1), name in CONTROLS, {STS.name: estimates[name]}, cost=(costs or {}).get(name))
        for name in right
    ]
    found = answer_of(results, STS, replicated, margin)
    # What is saved is the subject of the answer.
    saved = Comparison("m", "d", [STS], results, use=found.use).choice().recipe
    assert re.search(rf"(Use|Keep|The best is|: the best,) {saved} \(", headline(found, STS))
    return found, headline(found, STS), " ".join(reasons(found, STS, SPLITS, len(own)))


SCORE = r"[\d.]+ \[[\d.]+, [\d.]+\]"
FIRST = rf"PromptEOL \(last token\): {SCORE}(\.|, [\d.]+ before the correction for being the best of \d)"


ANSWERS = [
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
]  # fmt: skip


@pytest.mark.parametrize(("right", "use", "line", "why"), ANSWERS)
def test_the_answer(right, use, line, why):
    found, head, said = answered(right)
    assert found.use == use
    assert re.fullmatch(line, head), head
    assert re.match(FIRST, said), said
    assert re.search(why, said), said
    # The answer's score and interval are those of its row.
    assert found.score == found.best.scores[STS.name]


def test_equal_recipes_are_corrected_and_none_is_used():
    right = {f"R{row}, mean": 0.5 for row in range(8)} | {MEAN: 0.5}
    found, head, said = answered(right, noise=1)
    assert found.use == ""
    assert found.score.corrected < found.score.value
    assert re.search(rf": the best, R\d \(mean\), has {STS.show(found.score.corrected)}\.$", head)
    assert f"{STS.show(found.score.value)} before the correction for being the best of 8 recipes" in said
    assert "above it" not in said


CHEAPER = [
    ({PROMPT: 2.0, ECHO: 1.5, REBA: 1.2}, 0.695, 0.05, REBA),
    # Not clearly cheaper; surely further behind than the margin, or perhaps.
    ({PROMPT: 2.0, ECHO: 1.9, REBA: 1.85}, 0.695, 0.05, None),
    ({PROMPT: 2.0, ECHO: 1.5, REBA: 1.2}, 0.6, 0.05, None),
    ({PROMPT: 2.0, ECHO: 1.5, REBA: 1.2}, 0.695, 0.001, None),
    ({}, 0.695, 0.05, None),
]


@pytest.mark.parametrize(("costs", "share", "margin", "cheaper"), CHEAPER)
def test_a_cheaper_recipe_is_as_good_where_it_is_surely_within_the_margin(costs, share, margin, cheaper):
    found, _, said = answered({MEAN: 0.2, PROMPT: 0.7, ECHO: share, REBA: share}, costs, margin=margin)
    assert (found.best.name, found.cheaper and found.cheaper.name) == (PROMPT, cheaper)
    as_good = f"ReBA-2 (mean) is as good: it takes 60% of the time and is surely less than {STS.show(margin)} behind."
    assert (as_good in said) == (cheaper is not None)


def test_where_nothing_is_sure_nothing_is_ahead():
    found, head, said = answered({BAG: 0.1, MEAN: 0.1, PROMPT: 0.9}, sure=False)
    assert (found.use, len(found.others), found.score.corrected) == ("", found.controls, None)
    assert head.startswith("None is surely ahead of the 10.0 that you have without a recipe: the best, PromptEOL")
    assert said.startswith("PromptEOL (last token): 90.0. The score is the mean over 5 splits: ")
    assert "can tell" not in said
    # The score of few positives has no interval, and may be ahead.
    found, _, _ = answered({MEAN: 0.1, PROMPT: 0.9})
    score = dataclasses.replace(found.score, low=math.nan, high=math.nan)
    said = reasons(dataclasses.replace(found, score=score), STS, SPLITS, 1)[-2:]
    assert said[0] == "There are no intervals: 400 labelled pairs are too few, or too few of one kind."
    assert said[1].startswith("These 400 labelled pairs can tell differences of")


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
