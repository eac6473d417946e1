"""A whole comparison: its rows, its scores by a direct computation, its controls, and what is kept of it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
import torch

from st_reba import CausalTransformer, build
from st_reba.compare import Recipes, Splits, compare, prepared, run
from st_reba.compare.cost import FINALISTS, total_tokens
from st_reba.compare.recipes import classical
from st_reba.compare.run import controls_of
from st_reba.compare.splits import SPLITS, CrossFitted
from st_reba.data.demo import demo_sentences
from st_reba.data.tables import Classes, Pairs, Retrieval, Triplets
from st_reba.evaluation import OddOneOutEvaluator, Question
from st_reba.evaluation.tasks import task_of
from st_reba.recipes import asked_for, default_recipes, find
from st_reba.recipes.rows import PARTWISE

from ..backbones import TEXTS
from ..conftest import long

SENTENCES = [f"{place} {text[:20]}" for place, text in enumerate(demo_sentences("en")[:120])]
#: As many as halves need for a choice and filters, and too few.
PAIRS = Pairs(SENTENCES[:60], SENTENCES[60:], [float(number % 6) for number in range(60)])
FEW = Pairs(TEXTS, TEXTS[::-1], [1.0, 2.0, 5.0, 2.5, 1.5])
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
    every = asked_for(["all"], [f"{place} {text[:12]}" for place, text in enumerate(demo_sentences("en")[:40])])
    return [recipe for recipe in every if request.param is None or recipe.name in request.param]


def counted(path, asked, **settings):
    """Recipes, and a list of the tokens that were told to have been done."""
    done = []
    return Recipes(CausalTransformer(path), asked, on_progress=lambda _, tokens: done.append(tokens), **settings), done


@pytest.fixture(scope="module")
def recipes(asked, backbone_path, quick):
    return counted(backbone_path(), asked)


@pytest.fixture(scope="module")
def found(recipes):
    return compare(recipes[0], FEW, WORDS)


def test_rows_and_columns(recipes, found):
    made, done = recipes
    # About: what is run on random weights is not known before.
    announced = total_tokens(made, FEW.texts(), WORDS)
    assert 0.7 * announced < sum(done) <= 1.05 * announced
    assert [task.name for task in found.tasks] == ["STS", "Word sense"]
    names = [result.name for result in found.results]
    own = [recipe.result for recipe in made.all]
    assert names[: len(own) + 1] == ["tf-idf, mean", *own]
    assert found.results[0].scores.keys() == {"STS"}
    worded = {recipe.result for recipe in made.all if recipe.words}
    for result in found.results:
        assert ("Word sense" in result.scores) == (result.name.removeprefix("Random weights, ") in worded)
    assert any(name.startswith("Random weights, ") and "Bag" not in name for name in names)
    # Too few for intervals: nothing is sure, and the notes say why.
    assert found.use == ""
    assert all(math.isnan(result.scores["STS"].low) for result in found.results)
    assert any("there are no intervals" in sentence for sentence in found.verdict)


@pytest.fixture(scope="module")
def chosen(shallow_path, quick):
    """Recipes with candidates on pairs that are halved, filters fitted on the half that chooses; and what is found."""
    splits = Splits.of(PAIRS)
    asked = asked_for(["prompteol", "classical+centred", "value-aggregation"])
    made = prepared(CausalTransformer(shallow_path), asked, splits)
    return made, splits, compare(made, splits, random=False)


def cosines(model, pairs):
    sides = (torch.tensor(model.encode(side)) for side in (pairs.first, pairs.second))
    return torch.cosine_similarity(*sides).numpy()


@pytest.mark.parametrize("name", ["PromptEOL, last", "Classical, mean", "Classical, centred, mean"])
def test_a_score_is_that_of_a_direct_computation(name, chosen):
    """By models that embed each half, each fitted on the half that chooses, and SciPy."""
    made, splits, found = chosen
    own = [recipe for recipe in made.all if (recipe.candidate_of or recipe.result) == name]
    values = {}
    for place in range(len(splits.halves)):
        texts = splits.fit_on[place]
        recipes = [dataclasses.replace(recipe, fit_texts=texts) if recipe.fitted else recipe for recipe in own]
        models = [build(made.backbone, recipe, normalize=False, device="cpu") for recipe in recipes]
        values[place] = [cosines(model, splits.data) for model in models]

    def score(found, half):
        items = splits.halves[half]
        return scipy.stats.spearmanr(found[items], np.array(splits.data.scores)[items])[0]

    scores, settings = [], []
    for choosing, scoring in splits.directions:
        best = int(np.argmax([score(own, choosing) for own in values[choosing]]))
        settings.append(best)
        scores.append(score(values[choosing][best], scoring))
    result = next(result for result in found.results if result.name == name)
    assert result.scores["STS"].value == pytest.approx(np.mean(scores), abs=1e-6)
    assert sum(result.chosen.values()) == (2 * SPLITS if len(own) > 1 else 0)
    if len(own) > 1:
        assert result.chosen.get("as it is", 0) == settings.count(0)


def test_a_score_by_layer_is_that_of_all_items(roomy_path, quick):
    splits = Splits.of(PAIRS)
    made = prepared(CausalTransformer(roomy_path), asked_for(["prompteol"]), splits, controls=False)
    [result] = [result for result in compare(made, splits, random=False).results if result.recipe == "PromptEOL"]
    own = {str(recipe.layer or 3): made.model(recipe) for recipe in made.all if recipe.row.key == "prompteol"}
    assert result.by_layer.keys() == own.keys() == {"2", "3"}
    for layer, model in own.items():
        expected = scipy.stats.spearmanr(cosines(model, PAIRS), PAIRS.scores)[0]
        assert result.by_layer[layer] == pytest.approx(expected, abs=1e-6)


def test_the_order_of_the_file_changes_nothing(chosen):
    made, _, found = chosen
    again = compare(made, Splits.of(PAIRS.part(range(59, -1, -1))), random=False)
    scores = [{result.name: result.scores["STS"] for result in each.results} for each in (found, again)]
    assert scores[0] == scores[1]
    assert (again.answer, again.replicates.drawn_from) == (found.answer, found.replicates.drawn_from)
    other = compare(made, Splits.of(PAIRS, seed=1), random=False)
    assert other.replicates.drawn_from != found.replicates.drawn_from


def test_the_answer_is_its_row(chosen):
    _, _, found = chosen
    [best] = [result for result in found.results if result.scores["STS"].corrected is not None]
    score, task = best.scores["STS"], found.tasks[0]
    assert best.name not in ("Classical, mean", "Classical, last")
    assert task.show(score.corrected) in found.answer
    shown = f"{task.show(score.corrected)} {task.show_interval(score)}"
    assert found.verdict[0].startswith(f"{best.recipe} (last token): {shown}")
    assert found.settings["settings"] == "chosen on one half of 60 pairs, scored on the other, in turn"
    assert found.settings["filters fitted on"] == "the choosing half's texts"


def test_ties_are_with_an_embedding_without_a_recipe_where_it_leads():
    table, draw = object.__new__(run._Table), np.random.default_rng(0)
    every = [classical("mean"), classical("last"), find("prompteol"), find("echo-2")]
    table.recipes = {recipe.result: [recipe] for recipe in every}
    scores = dict(zip(table.recipes, (0.7, 0.69, 0.5, 0.49), strict=True))
    table.rows = {name: CrossFitted(score, score + draw.normal(0, 0.02, 400)) for name, score in scores.items()}
    table.splits, table.score = Splits.of(PAIRS), task_of(PAIRS).scores[0]
    marked = [name for name, own in table.estimates(table.replicated()).items() if own.tied]
    assert marked == [recipe.result for recipe in every[:2]]


def test_without_random_weights_and_without_controls(shallow_path):
    made, done = counted(shallow_path, default_recipes()[:2])
    found = compare(made, FEW, WORDS, random=False)
    assert sum(done) == pytest.approx(total_tokens(made, FEW.texts(), WORDS, random=False), rel=0.01)
    assert not any("Random" in result.name for result in found.results)
    asked = asked_for(["classical+centred", "reba-2"], TEXTS * 9)
    found = compare(Recipes(CausalTransformer(shallow_path), asked, controls=False), FEW, random=False)
    assert [result.name for result in found.results] == [recipe.result for recipe in asked]
    assert "No control was run beside it." in found.verdict


def test_the_unit_of_cost_is_classical_even_if_it_is_not_compared(shallow_path, monkeypatch):
    """The bag, which is next to free, is no unit."""
    asked = [recipe for recipe in default_recipes() if recipe.result in ("Classical, mean", "ReBA-2, last")]
    seconds = {"Classical, mean": 2.0, "Classical, last": 4.0, BAG: 0.1, "ReBA-2, last": 10}
    timed = []
    costs = run.seconds_of
    monkeypatch.setattr(run, "seconds_of", lambda *given: timed.append(costs(*given)) or seconds)
    found = compare(Recipes(CausalTransformer(shallow_path), asked), FEW)
    assert set(timed[0]) == set(seconds)
    by_name = {result.name: result for result in found.results}
    # The same seconds as the cost: what else ran on the machine is in neither.
    assert (by_name["ReBA-2, last"].cost, by_name["ReBA-2, last"].sentences_per_second) == (2.5, 0.1)
    assert by_name[BAG].cost == 0.05
    assert by_name[f"Random weights, {BAG}"].cost is by_name["tf-idf, mean"].sentences_per_second is None


TASKS = [
    (CLASSES, "Two classes"),
    (RETRIEVAL, "Retrieval"),
    (Triplets(TEXTS, TEXTS[::-1], TEXTS[1:] + TEXTS[:1]), "Triplets"),
    (Classes({text: str(place % 2) for place, text in enumerate(TEXTS)}), "Classes"),
]


@pytest.mark.parametrize(("data", "column"), TASKS)
def test_every_task_has_every_control(data, column, shallow_path):
    found = compare(Recipes(CausalTransformer(shallow_path), default_recipes()[:3]), data, WORDS)
    assert [task.name for task in found.tasks] == [column, "Word sense"]
    names = {result.name for result in found.results}
    assert {"tf-idf, mean", BAG, f"Random weights, {BAG}"} <= names
    assert all(not math.isnan(result.scores[column].value) for result in found.results)
    assert found.prompts == ({"query": "query: "} if data is RETRIEVAL else {})


NO_ANSWER = [
    (["classical"], PAIRS,
     "nothing but the embeddings that need no recipe was compared. Give --recipes that has more."),
    (["echo-2"], Pairs(TEXTS, TEXTS[::-1], [2.0] * 5),
     "no recipe has a score on STS. All labels are alike: give labelled pairs whose labels differ."),
    (["echo-2"], Pairs(["a"] * 5, ["a"] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]),
     "no recipe has a score on STS. Similarities are not numbers, or the same for all: give texts that differ, or "
     "take another --dtype."),
]  # fmt: skip


@pytest.mark.parametrize(("names", "data", "why"), NO_ANSWER)
def test_there_is_no_answer(names, data, why, shallow_path):
    found = compare(Recipes(CausalTransformer(shallow_path), asked_for(names)), data, random=False)
    assert found.answer == f"There is no answer: {why}"


def test_plain_texts_are_refused(shallow_path):
    with pytest.raises(ValueError, match="plain texts have no labels to score by: give pairs with scores, triplets,"):
        compare(Recipes(CausalTransformer(shallow_path), default_recipes()[:1]), TEXTS)


def test_a_tokenizer_goes_with_a_bare_language_model(shallow_path):
    backbone = CausalTransformer(shallow_path)
    for loaded in (backbone, Recipes(backbone, asked_for(["echo-2"]))):
        with pytest.raises(ValueError, match="^tokenizer .* leave it out.$"):
            compare(loaded, FEW, tokenizer=backbone.tokenizer)


def test_a_result_carries_its_recipe_and_its_controls(shallow_path):
    made = Recipes(CausalTransformer(shallow_path), asked_for(["classical+centred", "reba-2", "echo-2"], TEXTS * 9))
    found = compare(made, FEW)
    results = {result.name: result for result in found.results}
    for recipe in made.all:
        result = results[recipe.result]
        assert (result.spec, result.description) == (recipe.key, recipe.description)
        assert result.controls == controls_of(recipe)
        assert find(result.spec).row is recipe.row
    assert {control.name for control in results["Classical, centred, mean"].controls} <= results.keys()
    recipe = find("early-late")
    assert [(control.kind, control.name) for control in controls_of(recipe)] == [
        ("tf-idf", "tf-idf, mean"),
        ("bag", BAG),
        ("filtered bag", f"Bag of input embeddings, {PARTWISE}, mean"),
        ("random", f"Random weights, {recipe.result}"),
    ]
    assert controls_of(find("bag-of-input-embeddings").on_random_weights()) == ()
    untrained = [name for name in results if name.startswith("Random weights, ") and "Bag" not in name]
    assert 1 <= len(untrained) <= FINALISTS
    assert f"Random weights, {found.best().name}" in untrained
