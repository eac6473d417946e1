from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest

from st_reba import CausalTransformer
from st_reba.compare import Recipes, compare, compare_tasks, run, texts_of
from st_reba.compare.cost import total_tokens
from st_reba.compare.recipes import ModulePass
from st_reba.compare.run import Scores, finalists
from st_reba.data.demo import demo_sentences
from st_reba.data.tables import Pairs, Retrieval, Triplets
from st_reba.evaluation import OddOneOutEvaluator, Question
from st_reba.evaluation.bootstrap import Estimate
from st_reba.evaluation.tasks import Measure
from st_reba.recipes import asked_for, default_recipes, find
from st_reba.recipes.lookup import bags_of_input_embeddings, controls_of

from ..backbones import TEXTS
from ..conftest import first, paired
from .mteb.demo import DemoPairs, DemoSTSInOneSplit

PAIRS = Pairs(TEXTS, TEXTS[::-1], [1.0, 2.0, 5.0, 2.5, 1.5])
WORDS = OddOneOutEvaluator([Question("cat", ("a cat ran", "the cat sat", "my cat eats", "cat is a word"), 3)])

pytestmark = [pytest.mark.filterwarnings("ignore:There is no interval"), pytest.mark.usefixtures("timed_once")]


#: One or two of each way to run a model, to read its words, and to be fitted.
SOME = ("Classical", "ReBA-2", "Echo-2, bidirectional", "RT-2", "PromptEOL", "Value aggregation", "Classical, filtered")


@pytest.fixture(scope="module", params=first([SOME, None], 1), ids=["some", "every recipe"])
def asked(request):
    every = default_recipes(2, [f"{place} {text[:12]}" for place, text in enumerate(demo_sentences("en")[:40])])
    return [recipe for recipe in every if request.param is None or recipe.name in request.param]


@pytest.fixture(scope="module")
def recipes(asked, backbone_path, timed_once):
    done = []
    made = Recipes(CausalTransformer(backbone_path()), asked, on_progress=lambda what, tokens: done.append(tokens))
    made.done = done
    return made


@pytest.fixture(scope="module")
def found(recipes):
    return compare(recipes, PAIRS, WORDS)


def test_the_progress_that_was_announced(asked, recipes, found):
    """About: what is run on random weights is not known before."""
    announced = total_tokens(recipes, PAIRS.texts(), WORDS)
    assert 0.7 * announced < sum(recipes.done) <= 1.05 * announced


def test_rows_and_columns(recipes, found):
    assert [task.name for task in found.tasks] == ["STS", "Word sense", "Beyond overlap", "STS, Pearson"]
    trained = [result.name for result in found.results if not result.recipe.startswith("Random weights")]
    assert trained == ["tf-idf, mean", *recipes.keys]
    assert [result.name for result in found.results][: len(trained)] == trained
    assert found.results[0].control
    assert found.results[0].scores.keys() == {"STS", "STS, Pearson"}
    worded = {recipe.result for recipe in recipes.all if recipe.words}
    for result in found.results:
        assert ("Word sense" in result.scores) == (result.name.removeprefix("Random weights, ") in worded)
        assert "STS" in result.scores
    assert found.best().name in {result.name for result in found.results if not result.control}


def test_finalists():
    """The best and what is tied with it, three at most; and what was chosen before, whatever it scored."""
    recipes = default_recipes(2)
    bag = bags_of_input_embeddings(recipes)[0]
    keys = [recipe.result for recipe in recipes]
    scores = {key: Estimate(0.5 - place / 100, 0, 1, tied=place < 5) for place, key in enumerate(keys)}
    column = Scores(Measure("STS", "Spearman x 100"), {**scores, bag.result: Estimate(0.9, 0, 1)})
    assert finalists([bag, *recipes], column) == keys[:3]
    assert finalists([bag, *recipes], column, keys[7]) == [keys[7], *keys[:2]]
    apart = {key: dataclasses.replace(score, tied=key == keys[0]) for key, score in scores.items()}
    assert finalists(recipes, Scores(column.column, apart)) == keys[:1]
    lower = Measure("Loss", "loss", greater_is_better=False)
    assert finalists(recipes, Scores(lower, {**apart, keys[-1]: Estimate(math.nan, 0, 1)})) == [keys[-2], keys[0]]


def test_random_weights_for_the_finalists_alone(recipes, found):
    on_random = [result.name for result in found.results if result.recipe.startswith("Random weights, ")]
    bags = [key for key in recipes.controls if key.startswith("Bag")]
    assert 0 < len(on_random) - len(bags) <= 3
    assert on_random[: len(bags)] == [f"Random weights, {bag}" for bag in bags]
    best = found.best()
    assert f"Random weights, {best.name}" in on_random
    of_the_best = [name.removeprefix("Random weights, ") for name in on_random[len(bags) :]]
    assert f"Run on random weights were the best alone: {'; '.join(of_the_best)}." in found.verdict


def test_without_random_weights(shallow_path):
    done = []
    asked = default_recipes(1)[:2]
    recipes = Recipes(CausalTransformer(shallow_path), asked, on_progress=lambda what, tokens: done.append(tokens))
    found = compare(recipes, PAIRS, WORDS, random=False)
    told = (recipes, PAIRS.texts(), WORDS)
    assert sum(done) == pytest.approx(total_tokens(*told, random=False), rel=0.01)
    assert sum(done) < total_tokens(*told)
    assert not any("Random" in result.name for result in found.results)
    assert "Nothing was run on random weights, which may reach more than one expects." in found.verdict


def test_without_controls(shallow_path):
    asked = asked_for(["classical+centred", "reba-2"], 3, TEXTS * 9)
    recipes = Recipes(CausalTransformer(shallow_path), asked, controls=False)
    found = compare(recipes, PAIRS, random=False)
    assert [result.name for result in found.results] == [recipe.result for recipe in asked]
    assert [task.name for task in found.tasks] == ["STS", "STS, Pearson"]
    assert "no control was run" in found.answer or found.answer.startswith("None: ")
    assert not found.skipped


def test_what_each_pair_gave_is_kept(found, backbone_path):
    """So that the scores can be had once more, and paired with others on the same pairs."""
    items = found.items.items()
    values = dict(zip(items.recipes, items.scores, strict=True))
    assert values.keys() == {result.name for result in found.results}
    for result in found.results:
        assert values[result.name] == pytest.approx(result.scores["STS"].value, abs=1e-6, nan_ok=True)
    recipes = Recipes(CausalTransformer(backbone_path()), default_recipes(1)[:1])
    again = compare(recipes, PAIRS, random=False).items
    other = compare(recipes, Pairs(TEXTS, TEXTS[::-1], [2.0, 1.0, 5.0, 2.5, 1.5]), random=False).items
    assert found.items.data == again.data != other.data


def test_every_text_is_embedded_once_by_each_model(shallow_path, monkeypatch):
    embedded = []
    embed = Recipes._in_batches
    monkeypatch.setattr(
        Recipes, "_in_batches", lambda self, texts, prompt: embedded.append(texts) or embed(self, texts, prompt)
    )
    compare(Recipes(CausalTransformer(shallow_path), default_recipes(1)[:2]), PAIRS)
    assert sorted(text for texts in embedded for text in texts) == sorted([*set(TEXTS)] * 2)


def test_cost_is_relative_to_classical(found):
    by_name = {result.name: result for result in found.results}
    for result in found.results:
        if result.recipe.startswith(("Random weights", "tf-idf")):
            assert result.cost is result.sentences_per_second is None
        else:
            unit = by_name[f"Classical, {result.pooling}"]
            assert result.sentences_per_second > 0
            assert (result.cost == 1) == (result is unit)


def test_the_unit_of_cost_is_classical_even_if_it_is_not_compared(shallow_path, monkeypatch):
    """As in a search, whose finalists may have none with their pooling. The bag, which is next to free, is no unit."""
    asked = [recipe for recipe in default_recipes(2) if recipe.result in ("Classical, mean", "ReBA-2, last")]
    seconds = {"Classical, mean": 2.0, "Classical, last": 4.0, "Bag of input embeddings, mean": 0.1, "ReBA-2, last": 10}
    timed = []
    costs = run.seconds_of
    monkeypatch.setattr(run, "seconds_of", lambda recipes, texts: timed.append(costs(recipes, texts)) or seconds)
    found = compare(Recipes(CausalTransformer(shallow_path), asked), PAIRS)
    assert set(timed[0]) == set(seconds)
    by_name = {result.name: result for result in found.results}
    assert by_name["ReBA-2, last"].cost == 2.5
    # The same seconds as the cost: what else ran on the machine is in neither.
    assert by_name["ReBA-2, last"].sentences_per_second == 0.1
    assert by_name["Bag of input embeddings, mean"].cost == 0.05


@pytest.mark.parametrize(("batch_size", "data"), paired([2, 50], ["pairs", "texts"]))
def test_the_batch_size_is_what_was_asked(batch_size, data, shallow_path, monkeypatch):
    """For pairs it was ST's 32, for plain texts there was none."""
    texts = [f"{text} {number}" for number in range(8) for text in TEXTS]
    sizes = []
    encode = ModulePass.encode
    monkeypatch.setattr(ModulePass, "encode", lambda self, *given: sizes.append(len(given[0])) or encode(self, *given))
    # The bag.
    recipes = Recipes(CausalTransformer(shallow_path), default_recipes(1)[:1], batch_size=batch_size)
    labelled = Pairs(texts, texts[::-1], list(map(float, range(len(texts)))))
    found = compare(recipes, labelled if data == "pairs" else texts, random=False)
    assert max(sizes) == min(batch_size, sum(sizes))
    assert len(sizes) == (sum(sizes) + batch_size - 1) // batch_size
    assert len(found.lengths) == sum(sizes)


def test_what_else_is_reported(found):
    assert len(found.lengths) == len(TEXTS)
    assert found.settings["precision"] == "float32"
    assert set(found.versions) == {"python", "st_reba", "sentence-transformers", "transformers", "torch"}
    assert found.verdict[0].startswith("Best on STS: ")


def test_plain_texts(shallow_path):
    done = []
    recipes = Recipes(
        CausalTransformer(shallow_path),
        default_recipes(1)[:2],
        on_progress=lambda what, tokens: done.append(tokens),
    )
    texts = [*TEXTS, TEXTS[0]]
    found = compare(recipes, texts)
    assert sum(done) == pytest.approx(total_tokens(recipes, texts_of(texts)), rel=0.3)
    assert all(task.proxy for task in found.tasks)
    assert "these are proxies" in found.verdict[0]
    assert "no embedding" in dict(found.skipped)["tf-idf, mean"]
    assert not any(result.recipe == "tf-idf" for result in found.results)


TRIPLETS = Triplets(TEXTS[:4], TEXTS[1:], TEXTS[::-1][:4])
RETRIEVAL = Retrieval(
    {"q1": "find it", "q2": TEXTS[0]},
    {f"d{number}": text for number, text in enumerate(TEXTS)},
    {"q1": ("d1", "d2"), "q2": ("d0",)},
    {"query": "query: "},
)
CLASSES = Pairs(TEXTS, TEXTS[::-1], [1.0, 0.0, 1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        (CLASSES, ["Two classes", "Word sense", "Beyond overlap", "Two classes, Spearman"]),
        (TRIPLETS, ["Triplets", "Word sense"]),
        (RETRIEVAL, ["Retrieval", "Word sense", "Recall@100"]),
    ],
)
def test_every_task_has_every_control(data, columns, shallow_path):
    done = []
    recipes = Recipes(
        CausalTransformer(shallow_path), default_recipes(1)[:2], on_progress=lambda what, texts: done.append(texts)
    )
    found = compare(recipes, data, WORDS)
    assert sum(done) == pytest.approx(total_tokens(recipes, texts_of(data), WORDS), rel=0.3)
    assert [task.name for task in found.tasks] == columns
    bag = "Bag of input embeddings, mean"
    assert {"tf-idf, mean", bag, f"Random weights, {bag}"} <= {result.name for result in found.results}
    for result in found.results:
        assert not math.isnan(result.scores[columns[0]].value)
        assert ("Beyond overlap" in result.scores) == ("Beyond overlap" in columns and result.recipe != "tf-idf")
    assert found.prompts == ({"query": "query: "} if data is RETRIEVAL else {})


def test_a_query_is_embedded_behind_its_prompt(shallow_path, monkeypatch):
    recipes = Recipes(CausalTransformer(shallow_path), default_recipes(1)[:1])
    embedded = []
    add = recipes.add
    monkeypatch.setattr(
        recipes, "add", lambda texts, prompt: embedded.append((prompt, set(texts))) or add(texts, prompt)
    )
    compare(recipes, RETRIEVAL, random=False)
    assert embedded == [("query: ", {"find it", TEXTS[0]}), (None, set(TEXTS))]


def test_tasks_of_mteb(shallow_path, tmp_path):
    recipes = Recipes(CausalTransformer(shallow_path), default_recipes(1)[:1])
    tasks = [DemoSTSInOneSplit(), DemoPairs()]
    found = compare_tasks(recipes, tasks, model="tiny", output=tmp_path)
    names = [task.metadata.name for task in tasks]
    assert [task.name for task in found.tasks][:3] == ["Mean of tasks", *names]
    for result in found.results:
        values = [result.scores[name].value for name in names]
        assert result.scores["Mean of tasks"].value == pytest.approx(sum(values) / 2)
    assert found.lengths
    again = Recipes(CausalTransformer(shallow_path), default_recipes(1)[:1])
    known = compare_tasks(again, [DemoSTSInOneSplit(), DemoPairs()], model="tiny", output=tmp_path)
    assert known.lengths == []
    for task, score in known.results[0].scores.items():
        # mteb keeps six decimals.
        assert score.value == pytest.approx(found.results[0].scores[task].value, abs=1e-6)
    assert not math.isnan(known.results[0].cost)


def test_a_task_whose_data_do_not_load_once_more(shallow_path, monkeypatch):
    """For the controls on random weights: it stands there without them."""

    class Once(DemoPairs):
        def load_data(self, **kwargs):
            if self.loads:
                raise OSError("the Hub cannot be reached")
            super().load_data(**kwargs)

    monkeypatch.setattr(Once, "loads", 0)
    recipes = Recipes(CausalTransformer(shallow_path), default_recipes(1)[:1])
    found = compare_tasks(recipes, [DemoSTSInOneSplit(), Once()], model="tiny")
    untrained = [result for result in found.results if result.recipe.startswith("Random weights")]
    assert untrained
    columns = {"DemoSTSInOneSplit", "DemoSTSInOneSplit, cosine_pearson"}
    assert [{*result.scores} for result in untrained] == [columns] * len(untrained)
    trained = next(result for result in found.results if result.name == "Classical, mean")
    assert trained.scores.keys() > {"Mean of tasks", "DemoSTSInOneSplit", "DemoPairs"}
    assert "the Hub cannot be reached" in dict(found.skipped)["DemoPairs"]
    alone = compare_tasks(
        Recipes(CausalTransformer(shallow_path), default_recipes(1)[:1]), [DemoSTSInOneSplit()], model="tiny"
    )
    assert [result.name for result in alone.results] == [result.name for result in found.results]


def fitted(path, texts):
    keys = ("Classical, mean", "Classical, whitened, mean")
    asked = [recipe for recipe in default_recipes(1, texts) if recipe.result in keys]
    return Recipes(CausalTransformer(path), asked)


def test_kept_results_are_not_those_of_other_fit_texts(shallow_path, tmp_path):
    first, second = ([f"{text} {start + number}" for number in range(9) for text in TEXTS] for start in (0, 100))

    def scores(texts, output):
        recipes = fitted(shallow_path, texts)
        found = compare_tasks(recipes, [DemoSTSInOneSplit()], model="tiny", output=output, random=False)
        return {result.name: result.scores["DemoSTSInOneSplit"].value for result in found.results}, found.lengths

    before, _ = scores(first, tmp_path)
    after, embedded = scores(second, tmp_path)
    assert embedded
    alone, _ = scores(second, None)
    assert after == pytest.approx(alone, abs=1e-6)
    assert after["Classical, whitened, mean"] != pytest.approx(before["Classical, whitened, mean"], abs=1e-4)
    # What depends on no fit texts is kept.
    revisions = Counter(path.parts[-3] for path in (tmp_path / "results").rglob("DemoSTSInOneSplit.json"))
    twice = [name.removeprefix("st_reba__tiny__") for name, count in revisions.items() if count == 2]
    assert set(twice) == {
        "Bag-of-input-embeddings__whitened__mean", "Classical__whitened__mean",
    }  # fmt: skip
    _, embedded = scores(first, tmp_path)
    assert embedded == []


def test_a_result_carries_its_recipe_and_its_controls(backbone_path):
    recipes = Recipes(CausalTransformer(backbone_path()), asked_for(["classical+centred", "reba-2"], 3, TEXTS * 9))
    results = {result.name: result for result in compare(recipes, PAIRS).results}
    for recipe in recipes.all:
        result = results[recipe.result]
        assert (result.spec, result.says, result.called) == (recipe.key, recipe.says, recipe.called)
        assert result.controls == controls_of(recipe)
        assert find(result.spec).row is recipe.row
    kinds = {control.kind: control.name for control in results["Classical, centred, mean"].controls}
    assert kinds == {
        "tf-idf": "tf-idf, mean",
        "bag": "Bag of input embeddings, mean",
        "filtered bag": "Bag of input embeddings, centred, mean",
        "random": "Random weights, Classical, centred, mean",
    }
    assert set(kinds.values()) <= results.keys()


def test_revisions_tell_all_recipes_apart(roomy_path):
    every = default_recipes(fit_texts=[f"{number} {text[:9]}" for number in range(9) for text in TEXTS])
    made = Recipes(CausalTransformer(roomy_path), every)
    revisions = made.revisions()
    assert list(revisions) == made.keys
    assert len(set(revisions.values())) == len(revisions)
    assert Recipes(CausalTransformer(roomy_path), every).revisions() == revisions
    (prompted,) = (recipe for recipe in every if recipe.result == "PromptEOL, last")
    template = {"template": 'In a word, "{text}": "', "pool_over": "all"}
    other = dataclasses.replace(prompted, row=dataclasses.replace(prompted.row, settings=template))
    at_the_end = [recipe for recipe in every if recipe.result == "ReBA-2, last"]
    changed = Recipes(CausalTransformer(roomy_path), [other, *at_the_end]).revisions()
    assert changed["PromptEOL, last"] != revisions["PromptEOL, last"]
    # Whatever else is compared.
    assert changed["ReBA-2, last"] == revisions["ReBA-2, last"]


def test_the_head_is_in_the_key_of_what_it_filters(backbone_path, monkeypatch):
    module = CausalTransformer(backbone_path())
    module.model.config.tie_word_embeddings = True
    every = default_recipes(1, demo_sentences("en")[:40])
    asked = [recipe for recipe in every if recipe.method == "Classical" and recipe.pooling == "mean"]
    first = Recipes(module, asked).revisions()
    assert "Classical, filtered, mean" in first
    monkeypatch.setattr("st_reba.compare.recipes.fingerprint_of_weight", lambda name, blocks: "another head")
    second = Recipes(module, asked).revisions()
    assert {key for key in first if first[key] != second[key]} == {key for key in first if "filtered" in key}
