from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from scipy.stats import spearmanr
from sentence_transformers.util import pairwise_cos_sim

from st_reba import CausalTransformer, EchoModule
from st_reba.compare import Recipes, compare
from st_reba.compare.choice import Halves
from st_reba.compare.search import PLAIN, candidates, rung_sizes, search, searched, with_selection
from st_reba.data.demo import DEMO_PAIRS, demo_retrieval
from st_reba.data.tables import Pairs, Triplets, read_data, read_pairs
from st_reba.evaluation.tasks import task_of
from st_reba.recipes import Recipe
from st_reba.recipes.rows import FILTERS, PARTS

pytestmark = pytest.mark.usefixtures("quick")


def few():
    return [each for each in candidates(3) if each.row.name in ("Classical", "Echo-2", "ReBA-1")]


def changed():
    return [each for each in candidates(3) if each.row.unchanged in ("echo-2", "pretended-cot")]


@pytest.fixture(scope="module")
def backbone(backbone_path):
    return CausalTransformer(backbone_path("llama"))


@pytest.fixture(scope="module")
def pairs():
    every = read_pairs(DEMO_PAIRS)
    # Their beginnings, told apart: no score is looked at but beside another of the same texts.
    sides = [[f"{place} {text[:16]}" for place, text in enumerate(side)][:62] for side in (every.first, every.second)]
    return Pairs(*sides, every.scores[:62])


@pytest.fixture(scope="module")
def found(backbone, pairs):
    return search(backbone, pairs, every=few())


@pytest.fixture(scope="module")
def gain_of(backbone, pairs):
    """By how much the ready model of a candidate is ahead of the recipe without any choice, where it is chosen."""
    chosen_on, _ = Halves.of(pairs).parts

    def score(recipe):
        fitted = dataclasses.replace(recipe, fit_texts=tuple(chosen_on.texts()))
        sides = [
            fitted.model(backbone).encode(side, convert_to_tensor=True) for side in (chosen_on.first, chosen_on.second)
        ]
        return spearmanr(pairwise_cos_sim(*sides).cpu(), chosen_on.scores).statistic

    plain = score(PLAIN)
    return lambda recipe: score(recipe) - plain


def test_what_cannot_be_told_apart_is_refused(backbone):
    alike = Pairs([f"a {number}" for number in range(64)], [f"b {number}" for number in range(64)], [1.0] * 64)
    with pytest.raises(ValueError, match="No combination has a score on the pairs to choose on: all look the same to"):
        search(backbone, alike, every=few()[:2])


@pytest.mark.parametrize(("pairs", "sizes"), [(30, [30]), (89, [89]), (90, [30, 90]), (690, [76, 230, 690])])
def test_rungs(pairs, sizes):
    assert rung_sizes(pairs) == sizes


def test_candidates_are_all_combinations_and_all_different():
    every = candidates(32)
    assert len(every) == len({candidate.result for candidate in every})
    assert {candidate.layer for candidate in every} == {8, 12, 16, 20, 24, 28, 31, None}
    plain, under_a_change = (
        sum(len(row.own_poolings) for row in searched() if bool(row.unchanged) is changed) for changed in (False, True)
    )
    # The two that end with the last but one have no other reading of it.
    assert len(every) == (plain * 8 - 2 + under_a_change) * (1 + len(FILTERS))
    # Under its own name: a bidirectional last layer under last pooling is what it is without.
    found = {candidate.result: candidate.layer for candidate in changed() if not candidate.filter}
    anywhere = ("re-routed", "prepended", "before-mlp")
    echo = {f"Echo-2, {change}, {pooling}" for change in anywhere for pooling in ("mean", "last")}
    prompted = {f"Pretended CoT, {change}, last" for change in (*anywhere, "steered")}
    assert found.keys() == {*echo, *prompted, "Echo-2, bidirectional, mean", "Echo-2, steered, last"}
    assert set(found.values()) == {None}


def of_each_kind():
    """Each change once, a filter behind one, and a prompt that its authors read at the last but one layer."""
    by_change = {one.result.split(", ")[1]: one for one in changed() if not one.filter}
    knowledge = [one for one in candidates(3) if one.row.name == "Knowledge" and not one.filter]
    filtered = [one for one in changed() if one.part is PARTS["whitened"]]
    return [*by_change.values(), *knowledge, filtered[0], filtered[-1]]


@pytest.mark.parametrize("candidate", of_each_kind(), ids=lambda candidate: candidate.result)
def test_a_recipe_is_scored_as_the_ready_model(candidate, backbone, pairs, gain_of):
    if candidate.row.name == "Knowledge":
        module = candidate.model(backbone)[0]
        assert (module.output_layer, module.final_norm) == (candidate.layer or 2, False)
    assert search(backbone, pairs, every=[candidate]).gain == pytest.approx(gain_of(candidate), abs=1e-3)


def test_the_best_come_first_and_survive(backbone, pairs, found, gain_of):
    """Layers of one pass, poolings, and filters on top: as the ready model gives them."""
    gains = [search(backbone, pairs, every=[candidate]).gain for candidate in found.finalists]
    assert gains[:3] == pytest.approx([gain_of(candidate) for candidate in found.finalists[:3]], abs=1e-3)
    assert all(first >= second - 1e-6 for first, second in pairwise(gains))
    assert found.gain == pytest.approx(gains[0], abs=1e-6)


def test_several_rungs_keep_a_third(backbone, pairs):
    # Their texts are short: how many candidates a rung keeps, no score decides.
    large = Pairs(*([f"{side} {number}" for number in range(558)] for side in "ab"), pairs.scores * 9)
    found = search(backbone, large, every=[candidate for candidate in few() if candidate.row.name == "Classical"])
    assert [rung.items for rung in found.rungs] == rung_sizes(len(found.chosen_on))
    assert [rung.candidates for rung in found.rungs] == [30, 10, 5]


def test_a_rung_without_both_classes_is_passed_over(backbone, pairs):
    """Of few pairs that are alike, the first rung may have none."""
    first, second = ([f"{text} {copy}" for copy in range(3) for text in side] for side in (pairs.first, pairs.second))
    rare = Pairs(first, second, [float(number in (5, 105)) for number in range(len(first))])
    sizes = rung_sizes(len(rare) // 2)
    halves = {seed: Halves.of(rare, seed).parts[0] for seed in range(50)}
    seed = next(seed for seed, half in halves.items() if any(half.scores) and not any(half.head(sizes[0]).scores))
    found = search(backbone, rare, every=[PLAIN], seed=seed)
    assert [rung.items for rung in found.rungs] == sizes[1:]


def test_what_is_held_out_is_never_read(backbone, pairs, monkeypatch):
    read = []
    preprocess = CausalTransformer.preprocess
    monkeypatch.setattr(
        CausalTransformer, "preprocess", lambda self, texts, **kw: read.extend(texts) or preprocess(self, texts, **kw)
    )
    found = search(backbone, pairs, every=[PLAIN, *few()[:8]])
    assert set(read) == set(found.chosen_on.texts())
    assert not set(read) & set(found.held_out.texts())


class _Refusing(EchoModule):
    def __init__(self, backbone, **settings):
        raise ValueError("not on this model")


def test_what_a_model_cannot_run_is_left_out(backbone, pairs):
    broken = Recipe(dataclasses.replace(PLAIN.row, key="broken", name="Broken", copies=None, module=_Refusing), "mean")
    assert search(backbone, pairs, every=[PLAIN, broken]).finalists == [PLAIN]
    with pytest.raises(ValueError, match="LlamaModel can run none of the recipes"):
        search(backbone, pairs, every=[broken])


def shown(backbone, found, **settings):
    """What was chosen, on the other half."""
    recipes = Recipes(backbone, found.recipes(), controls=settings.get("random", True))
    return with_selection(found, compare(recipes, found.held_out, chosen=found.chosen, **settings))


def test_the_report_says_how_much_was_selection(backbone, pairs, found):
    comparison = shown(backbone, found)
    chosen = found.finalists[0].result
    assert comparison.choice().name == comparison.chosen == found.chosen == chosen
    assert f"Chosen before these scores were known: {chosen}" in " ".join(comparison.verdict)
    assert f"chose {chosen}" in comparison.verdict[0]
    assert f"{len(found.held_out)} other pairs" in comparison.verdict[0]
    scores = {result.name: result.scores["STS"].value for result in comparison.results}
    held, task = scores[chosen] - scores["Classical, mean"], comparison.tasks[0]
    assert f"ahead of Classical, mean by {task.show(found.gain)}" in comparison.verdict[1]
    assert f"{task.show(found.gain - held)} of the gain was selection" in comparison.verdict[1]
    assert {f"Random weights, {chosen}", "Bag of input embeddings, mean"} <= set(scores)
    nothing = shown(backbone, search(backbone, pairs, every=[PLAIN]), random=False)
    assert nothing.verdict[1] == "It found nothing better than the recipe without any choice."


@pytest.mark.parametrize("kind", ["classes", "triplets", "retrieval"])
def test_other_tasks(kind, backbone, pairs):
    """Chosen on one half, shown on the other; a score is what the ready model gets there."""
    retrieval = read_data(demo_retrieval("en"))
    documents = {key: retrieval.documents[key][:24] for keys in retrieval.relevant.values() for key in keys}
    data = {
        "classes": Pairs(pairs.first, pairs.second, [float(score > 2) for score in pairs.scores]),
        "triplets": Triplets(pairs.first, pairs.second, pairs.second[::-1]),
        "retrieval": dataclasses.replace(retrieval, documents=documents, prompts={"query": "query: "}),
    }[kind]
    every = [each for each in few() if each.row.name == "Classical" and not each.filter and each.layer in (2, None)]
    found = search(backbone, data, every=every)
    assert set(found.chosen_on.items()) | set(found.held_out.items()) == set(data.items())
    assert not set(found.chosen_on.items()) & set(found.held_out.items())
    evaluator = task_of(found.chosen_on)
    scores = []
    for candidate in (found.finalists[0], PLAIN):
        model = candidate.model(backbone)
        model.prompts = dict(task_of(data).prompts)
        scores.append(evaluator(model)[evaluator.primary_metric])
    assert found.gain == pytest.approx(scores[0] - scores[1], abs=1e-3)
    assert f"{len(found.held_out)} other {data.noun}" in shown(backbone, found, random=False).verdict[0]
