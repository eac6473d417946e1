from __future__ import annotations

import math

import pytest

from st_reba import CausalTransformer
from st_reba.compare import Recipes, compare, run
from st_reba.compare.answer import Standing
from st_reba.compare.cost import total_tokens
from st_reba.compare.results import Result
from st_reba.compare.run import finalists
from st_reba.data.demo import demo_sentences
from st_reba.data.tables import Pairs, Retrieval
from st_reba.evaluation import OddOneOutEvaluator, Question
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure
from st_reba.recipes import asked_for, default_recipes, find
from st_reba.recipes.lookup import controls_of

from ..backbones import TEXTS
from ..conftest import long

PAIRS = Pairs(TEXTS, TEXTS[::-1], [1.0, 2.0, 5.0, 2.5, 1.5])
CLASSES = Pairs(TEXTS, TEXTS[::-1], [1.0, 0.0, 1.0, 0.0, 1.0])
RETRIEVAL = Retrieval(
    {"q1": "find it", "q2": TEXTS[0]},
    {f"d{number}": text for number, text in enumerate(TEXTS)},
    {"q1": ("d1", "d2"), "q2": ("d0",)},
    {"query": "query: "},
)
WORDS = OddOneOutEvaluator([Question("cat", ("a cat ran", "the cat sat", "my cat eats", "cat is a word"), 3)])
BAG = "Bag of input embeddings, mean"

pytestmark = [pytest.mark.filterwarnings("ignore:There is no interval"), pytest.mark.usefixtures("quick")]

#: One or two of each way to run a model, to read its words, and to be fitted.
SOME = ("Classical", "ReBA-2", "Echo-2, bidirectional", "RT-2", "PromptEOL", "Value aggregation", "Classical, filtered")


@pytest.fixture(scope="module", params=[SOME, long(None)], ids=["some", "every recipe"])
def asked(request):
    every = default_recipes(2, [f"{place} {text[:12]}" for place, text in enumerate(demo_sentences("en")[:40])])
    return [recipe for recipe in every if request.param is None or recipe.name in request.param]


def counted(path, asked, **settings):
    """Recipes, and a list of the tokens that were told to have been done."""
    done = []
    return Recipes(
        CausalTransformer(path), asked, on_progress=lambda what, tokens: done.append(tokens), **settings
    ), done


@pytest.fixture(scope="module")
def recipes(asked, backbone_path, quick):
    return counted(backbone_path(), asked)


@pytest.fixture(scope="module")
def found(recipes):
    return compare(recipes[0], PAIRS, WORDS)


def test_rows_and_columns(recipes, found):
    made, done = recipes
    # About: what is run on random weights is not known before.
    announced = total_tokens(made, PAIRS.texts(), WORDS)
    assert 0.7 * announced < sum(done) <= 1.05 * announced
    assert [task.name for task in found.tasks] == ["STS", "Word sense", "Beyond overlap", "STS, Pearson"]
    names = [result.name for result in found.results]
    assert names[: len(made.keys) + 1] == ["tf-idf, mean", *made.keys]
    assert found.results[0].scores.keys() == {"STS", "STS, Pearson"}
    worded = {recipe.result for recipe in made.all if recipe.words}
    for result in found.results:
        assert ("Word sense" in result.scores) == (result.name.removeprefix("Random weights, ") in worded)
    assert f"Random weights, {found.best().name}" in names


def test_finalists():
    """The best and what is tied with it, three at most; and what the answer names, whatever it scored."""
    column = Measure("t", "accuracy")
    values = {"a": 0.5, "b": 0.4, "c": 0.3, "d": 0.2, "none": math.nan}

    def names(tied, advised=""):
        results = [Result(key, "mean", False, {"t": Estimate(own, 0, 1, key in tied)}) for key, own in values.items()]
        bag = Result("bag", "mean", True, {"t": Estimate(0.9, 0, 1)})
        return [name.removesuffix(", mean") for name in finalists(Standing([bag, *results], column, None), advised)]

    assert names("abcd") == ["a", "b", "c"]
    assert names("abcd", advised="d, mean") == ["d", "a", "b"]
    assert names("a") == ["a"]


def test_without_random_weights_and_without_controls(shallow_path):
    made, done = counted(shallow_path, default_recipes(1)[:2])
    found = compare(made, PAIRS, WORDS, random=False)
    assert sum(done) == pytest.approx(total_tokens(made, PAIRS.texts(), WORDS, random=False), rel=0.01)
    assert not any("Random" in result.name for result in found.results)
    assert "Nothing was run on random weights: these may score more than one expects." in found.verdict
    asked = asked_for(["classical+centred", "reba-2"], 3, TEXTS * 9)
    found = compare(Recipes(CausalTransformer(shallow_path), asked, controls=False), PAIRS, random=False)
    assert [result.name for result in found.results] == [recipe.result for recipe in asked]


def test_what_each_pair_gave_is_kept(found, shallow_path):
    """So that the scores can be had once more, and paired with others on the same pairs."""
    items = found.items.items()
    values = dict(zip(items.recipes, items.scores, strict=True))
    assert values.keys() == {result.name for result in found.results}
    for result in found.results:
        assert values[result.name] == pytest.approx(result.scores["STS"].value, abs=1e-6, nan_ok=True)
    recipes = Recipes(CausalTransformer(shallow_path), default_recipes(1)[:1])
    again = compare(recipes, PAIRS, random=False).items
    other = compare(recipes, CLASSES, random=False).items
    assert found.items.data == again.data != other.data


def test_the_unit_of_cost_is_classical_even_if_it_is_not_compared(shallow_path, monkeypatch):
    """The bag, which is next to free, is no unit."""
    asked = [recipe for recipe in default_recipes(2) if recipe.result in ("Classical, mean", "ReBA-2, last")]
    seconds = {"Classical, mean": 2.0, "Classical, last": 4.0, BAG: 0.1, "ReBA-2, last": 10}
    timed = []
    costs = run.seconds_of
    monkeypatch.setattr(
        run, "seconds_of", lambda recipes, texts, own: timed.append(costs(recipes, texts, own)) or seconds
    )
    found = compare(Recipes(CausalTransformer(shallow_path), asked), PAIRS)
    assert set(timed[0]) == set(seconds)
    by_name = {result.name: result for result in found.results}
    # The same seconds as the cost: what else ran on the machine is in neither.
    assert (by_name["ReBA-2, last"].cost, by_name["ReBA-2, last"].sentences_per_second) == (2.5, 0.1)
    assert by_name[BAG].cost == 0.05
    assert by_name[f"Random weights, {BAG}"].cost is by_name["tf-idf, mean"].sentences_per_second is None


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        (CLASSES, ["Two classes", "Word sense", "Beyond overlap", "Two classes, Spearman"]),
        (RETRIEVAL, ["Retrieval", "Word sense", "Recall@100"]),
    ],
)
def test_every_task_has_every_control(data, columns, shallow_path):
    found = compare(Recipes(CausalTransformer(shallow_path), default_recipes(1)[:2]), data, WORDS)
    assert [task.name for task in found.tasks] == columns
    names = {result.name for result in found.results}
    assert {BAG, f"Random weights, {BAG}"} <= names
    for result in found.results:
        assert not math.isnan(result.scores[columns[0]].value)
        assert ("Beyond overlap" in result.scores) == ("Beyond overlap" in columns and result.recipe != "tf-idf")
    assert found.prompts == ({"query": "query: "} if data is RETRIEVAL else {})
    assert "tf-idf, mean" in names


def test_plain_texts_are_refused(shallow_path):
    with pytest.raises(ValueError, match="plain texts have no labels to score by: give pairs with scores, triplets,"):
        compare(Recipes(CausalTransformer(shallow_path), default_recipes(1)[:1]), TEXTS)


def test_a_result_carries_its_recipe_and_its_controls(shallow_path):
    recipes = Recipes(CausalTransformer(shallow_path), asked_for(["classical+centred", "reba-2"], 3, TEXTS * 9))
    results = {result.name: result for result in compare(recipes, PAIRS).results}
    for recipe in recipes.all:
        result = results[recipe.result]
        assert (result.spec, result.says, result.called) == (recipe.key, recipe.says, recipe.called)
        assert result.controls == controls_of(recipe)
        assert find(result.spec).row is recipe.row
    assert {control.name for control in results["Classical, centred, mean"].controls} <= results.keys()
