"""Recipes on one model: what they give beside what each gives alone, on random weights, and after a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import math
import os
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from st_reba import CausalTransformer, build, encode_words
from st_reba.compare import Recipes, TensorCache, compare, cost
from st_reba.compare.cost import Forecast, memory, speed, timed_batch
from st_reba.compare.recipes import ModulePass, SweepPass, classical, set_aside, tokens, unprocessed, with_candidates
from st_reba.data.demo import demo_pairs, demo_sentences
from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation import OddOneOutEvaluator, Question
from st_reba.evaluation.rankings import TfIdf
from st_reba.lm.views import depth
from st_reba.modules import PartwiseWhitening, ValueAggregationModule
from st_reba.reading.words import tokens_of
from st_reba.recipes import Recipe, asked_for, default_recipes, find, random_weights
from st_reba.recipes.rows import POST_PROCESSORS

from .. import processes
from ..backbones import TEXTS as ALL_TEXTS
from ..conftest import raising, relative_error, time_once

TEXTS = ALL_TEXTS[:3]
# More of them than there are dimensions, and short; one without tokens, which does not count.
FIT_TEXTS = ["", *(f"{place} {text[:12]}" for place, text in enumerate(demo_sentences("en")[:50]))]
pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")
SENTENCES, WORDS = ["a cat ran", "the cat sat", "my dog eats"], ["cat", "cat", "dog"]


def vectors_of(made, texts, prompt=None):
    return {recipe.result: made.matrix(recipe, texts, prompt) for recipe in made.all}


def made_of(roomy, recipes):
    """Recipes, and a list of what they have done."""
    done = []
    made = Recipes(roomy, recipes, batch_size=2, on_progress=lambda what, tokens: done.append((what, tokens)))
    return made, done


@pytest.fixture(scope="module")
def recipes(roomy):
    return made_of(roomy, asked_for(["all"], FIT_TEXTS))


@pytest.fixture(scope="module")
def few(roomy):
    """Some of them: of each way to run the model one, and what is fitted."""
    names = ("Classical", "Classical, whitened", "ReBA-2", "RT-2", "PromptEOL")
    return made_of(roomy, [each for each in asked_for(["all"], FIT_TEXTS) if each.name in names])


def test_every_recipe_as_it_is_alone(recipes, roomy):
    made, done = recipes
    vectors_of(made, TEXTS[:1])
    before = len(done)
    found, words = vectors_of(made, TEXTS, "query: "), made.words(SENTENCES, WORDS)
    # One for each way to run the model.
    assert Counter(what for what, _ in done[before:]).keys() == {"Embedding", "Words"}
    assert 10 < len(done) - before < len(found)
    assert set(words) == {recipe.name for recipe in made.all if recipe.words}
    for recipe in made.all:
        alone = build(roomy, recipe, normalize=False, device="cpu")
        assert relative_error(found[recipe.result], alone.encode(TEXTS, prompt="query: ")) < 1e-5, recipe.result
        if recipe.words and recipe.pooling == "mean":
            assert relative_error(words[recipe.name], encode_words(alone, SENTENCES, WORDS)) < 1e-5, recipe.result
    # The tiny backbone was saved without its head.
    own, filtered = [recipe.result for recipe in made.all if not recipe.control], POST_PROCESSORS["filtered"]
    assert own == [recipe.result for recipe in default_recipes() if recipe.post_processor != filtered]


def test_some_on_random_weights(few, roomy):
    """Each as it is alone; and the trained weights are out of memory meanwhile, and back at the end."""
    made, _ = few
    whitened = next(recipe for recipe in made.all if recipe.result == "Classical, whitened, mean")
    before = made.model(whitened).encode(TEXTS)
    keys = ["Classical, whitened, last", "ReBA-2, mean", "PromptEOL, last"]
    with made.on_random_weights(keys) as controls:
        assert sum(parameter.numel() for parameter in roomy.model.parameters()) == 0
        chosen = [recipe.result for recipe in made.all if recipe.bag or recipe.result in keys]
        assert [recipe.result for recipe in controls.all] == [f"Random weights, {key}" for key in chosen]
        assert all(recipe.control for recipe in controls.all)
        found, words = vectors_of(controls, TEXTS), controls.words(SENTENCES, WORDS)
    assert np.array_equal(made.model(whitened).encode(TEXTS), before)
    random = random_weights(roomy)
    for recipe in controls.all:
        alone = build(random, recipe, normalize=False, device="cpu")
        assert relative_error(found[recipe.result], alone.encode(TEXTS)) < 1e-5, recipe.result
        if recipe.words:
            assert relative_error(words[recipe.name], encode_words(alone, SENTENCES, WORDS)) < 1e-5


def test_recipes_that_a_backbone_cannot_run_are_left_out(backbone_path):
    """And filters that have too few texts."""
    made = Recipes(CausalTransformer(backbone_path("bloom")), asked_for(["all"], ["a cat ran", "the dogs sat"]))
    skipped = dict(made.skipped)
    assert "cannot be made to attend both ways" in skipped["Bidirectional, mean"]
    assert {"RT-2, last", "ReBA-2, mean"} <= skipped.keys()
    assert "2 texts are too few to find 1 principal" in skipped["Classical, all but the top, mean"]


# Recipes that fail


@pytest.mark.filterwarnings("ignore:There is no interval")
def test_a_comparison_goes_on_without_the_recipes_that_an_architecture_cannot_run(backbone_path, monkeypatch):
    # Not by the fixture ``quick``, which holds for the whole module: other tests here time recipes as users do.
    time_once(monkeypatch)
    bloom = CausalTransformer(backbone_path("bloom"))
    found = compare(Recipes(bloom, asked_for(["few"], FIT_TEXTS), fit_on=[tuple(FIT_TEXTS)]), PAIRS)
    assert {name for name, _ in found.skipped} == {"ReBA-2, mean", "ReBA-2, last"}
    assert all(reason.startswith("The attention of BloomModel in layers") for _, reason in found.skipped)
    names = {result.name for result in found.results if result.cost is not None}
    assert {"Classical, mean", "Classical, last", "Echo-2, mean", "Topic, standardised sum, last"} <= names


TRIED = ("classical", "value-aggregation", "early-late")


def failing(monkeypatch, roomy, kind, name, fail, recipes=TRIED):
    """Recipes, one of which gives nothing: a method of its class does something else."""
    monkeypatch.setattr(kind, name, fail)
    made = Recipes(roomy, asked_for(recipes), controls=False, batch_size=2, fit_on=[tuple(FIT_TEXTS)])
    made.add([*TEXTS, *FIT_TEXTS])
    return made


ERRORS_OF_A_RECIPE = [
    (RuntimeError("no such kernel\nlong trace"), "RuntimeError: no such kernel"),
    (IndexError(), "IndexError"),
    (AttributeError("x"), "AttributeError: x"),
    (ValueError("Give another model."), "Give another model."),
]


@pytest.mark.parametrize(("error", "reason"), ERRORS_OF_A_RECIPE)
@pytest.mark.parametrize("name", ["__init__", "read"])
def test_whatever_a_recipe_raises_it_is_left_out(roomy, monkeypatch, name, error, reason):
    made = failing(monkeypatch, roomy, ValueAggregationModule, name, raising(error))
    assert made.skipped == [("Value aggregation, last", reason)]
    assert len(made.all) == 3
    alone = build(roomy, "classical", pooling="last", normalize=False, device="cpu").encode(TEXTS)
    assert relative_error(made.matrix(classical("last"), TEXTS), alone) < 1e-5


ERRORS_OF_THE_MACHINE = [
    (MemoryError(), MemoryError),
    (RuntimeError("CUDA out of memory. Tried"), RuntimeError),
    (OSError(errno.ENOSPC, "full"), OSError),
    (KeyboardInterrupt(), KeyboardInterrupt),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS_OF_THE_MACHINE)
def test_what_is_the_machines_ends_it(roomy, monkeypatch, error, expected):
    with pytest.raises(expected):
        failing(monkeypatch, roomy, ValueAggregationModule, "read", raising(error))


def test_no_recipe_is_left(roomy, monkeypatch):
    with pytest.raises(ValueError, match="^No recipe can run on this model. Value aggregation, last: IndexError: x$"):
        failing(monkeypatch, roomy, ValueAggregationModule, "read", raising(IndexError("x")), TRIED[1:2])


def test_vectors_that_are_no_numbers(roomy, monkeypatch):
    encode = ModulePass.encode

    def other(self, *args):
        found = encode(self, *args)
        return {name: own * torch.nan if "Value" in name else own for name, own in found.items()}

    made = failing(monkeypatch, roomy, ModulePass, "encode", other)
    assert made.skipped == [("Value aggregation, last", "A value is infinite or not a number in float32.")]


def test_a_filter_that_cannot_be_fitted_on_one_set(roomy, monkeypatch):
    fitted = PartwiseWhitening.from_moments.__func__
    few = classmethod(lambda cls, moments, **given: 1 / 0 if moments.count < 45 else fitted(cls, moments, **given))
    monkeypatch.setattr(PartwiseWhitening, "from_moments", few)
    made = Recipes(roomy, asked_for(TRIED), fit_on=[tuple(FIT_TEXTS), tuple(FIT_TEXTS[:40])])
    names = ["Bag of input embeddings, partwise whitened, mean", "Early and late, partwise whitened, mean"]
    assert made.skipped == [(name, "ZeroDivisionError: division by zero") for name in names]


def test_what_fails_when_it_is_timed_or_on_random_weights(roomy, monkeypatch):
    made = Recipes(roomy, asked_for(TRIED), fit_on=[tuple(FIT_TEXTS)])
    made.add(TEXTS)
    timed = [recipe for recipe in made.all if not recipe.control]
    monkeypatch.setattr(ValueAggregationModule, "forward", raising(IndexError("x")))
    expected = {recipe.result for recipe in timed} - {"Value aggregation, last"}
    assert cost.seconds_of(made, TEXTS, timed).keys() == expected
    with made.on_random_weights(["Value aggregation, last", "Classical, mean"]) as untrained:
        untrained.add(TEXTS)
        assert "Random weights, Classical, mean" in {recipe.result for recipe in untrained.all}
    assert made.skipped == [("Random weights, Value aggregation, last", "IndexError: x")]
    monkeypatch.setattr("st_reba.compare.recipes.random_weights", raising(RuntimeError("cannot be drawn")))
    with made.on_random_weights(["Classical, mean"]) as untrained:
        untrained.add(TEXTS)
        assert untrained.all == []
    assert ("Random weights, Classical, mean", "RuntimeError: cannot be drawn") in made.skipped
    assert np.isfinite(made.model(classical("mean")).encode(TEXTS)).all()


# Matrices


def test_filters_on_several_sets_and_modules_that_are_built_once(roomy, monkeypatch):
    built, make = Counter(), Recipe.build
    monkeypatch.setattr(Recipe, "build", lambda self, of: built.update([unprocessed(self).name]) or make(self, of))
    sets = [tuple(FIT_TEXTS), tuple(FIT_TEXTS[:45]), tuple(TEXTS + FIT_TEXTS[:42])]
    asked = [each for recipe in asked_for(["early-late", "topic"]) for each in with_candidates(recipe, 3)]
    made = Recipes(roomy, asked, fit_on=sets)
    made.add(TEXTS)
    for place, texts in enumerate(sets):
        for recipe in made.all[::5]:
            alone = build(roomy, replace(recipe, fit_texts=texts), normalize=False, device="cpu")
            found = made.matrix(recipe, TEXTS, fitted_on=place)
            assert relative_error(found, alone.encode(TEXTS)) < 1e-4, recipe.result
            assert torch.equal(made.matrix(recipe, TEXTS, fitted_on=place - 3), found)
    cost.seconds_of(made, TEXTS, made.all[:4])
    assert max(built.values()) == 1


# Time


def test_what_else_runs_on_a_processor_is_no_cost(monkeypatch):
    """Of each batch the fastest round; on another device the clock is all there is."""
    now = {"clock": 0.0, "processor": 0.0}
    clocks = {"perf_counter": lambda: now["clock"], "process_time": lambda: now["processor"]}
    monkeypatch.setattr(cost, "time", SimpleNamespace(**clocks))
    waits = itertools.cycle([4.0, 0.5])

    class Model:
        def encode(self, batch, **settings):
            now["processor"] += 0.1 * len(batch)
            now["clock"] += 0.1 * len(batch) + next(waits)

    def seconds(texts, device):
        recipes = SimpleNamespace(
            backbone=SimpleNamespace(model=SimpleNamespace(device=SimpleNamespace(type=device))), batch_size=8,
            model=lambda recipe: Model(), modules=SimpleNamespace(of=lambda recipe: None),
            on_progress=lambda what, count: None,
        )  # fmt: skip
        monkeypatch.setattr(cost, "tokens", lambda *counted: 1.0)
        [spent] = cost.seconds_of(recipes, texts, [classical("mean")]).values()
        return spent

    assert seconds(["a", "b"], "cpu") == pytest.approx(0.1)
    assert seconds(["a", "b"], "cuda") == pytest.approx(0.35)
    # What Windows counts of a processor moves in ticks that are longer than many a batch.
    monkeypatch.setattr(sys, "platform", "win32")
    assert seconds(["a", "b"], "cpu") == pytest.approx(0.35)
    # A round that takes long is enough.
    waits = itertools.repeat(9.0)
    assert seconds(["a"], "cuda") == pytest.approx(9.1)


# Weights that are set aside


class Own(nn.Parameter):
    """As quantised weights have."""


@pytest.fixture
def model():
    made = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 7, bias=False))
    made[2].weight = made[0].weight
    made[1].bias = Own(made[1].bias.detach())
    return made


def test_weights_are_gone_and_come_back_to_the_bit(model, monkeypatch):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    with contextlib.suppress(KeyboardInterrupt), set_aside(model):
        sizes = {name: value.numel() for name, value in model.state_dict().items()}
        assert sizes == {"0.weight": 0, "1.weight": 0, "1.bias": 4, "2.weight": 0}
        raise KeyboardInterrupt
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(own is other for own, other in zip(model.parameters(), parameters, strict=True))

    # They stay where the disk has no room.
    full = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
    monkeypatch.setattr(torch, "save", raising(full))
    with set_aside(model):
        assert model[0].weight.numel() == 28


# Runs that are killed

MANY = [f"{text} {number}" for number in range(2) for text in ALL_TEXTS]
PAIRS = Pairs(MANY, [f"{text[: 3 * place]}!" for place, text in enumerate(MANY)], [0.0, 1.0, 2.0, 3.0, 4.0] * 2)
CAT = Question("cat", ("a cat ran", "the cat sat", "my cat eats", "cat is a word"), 3)
DOG = Question("dog", ("dog is a word", "the dog sat", "my dog eats", "a dog ran"), 0)


def compared(path, directory):
    asked = asked_for(["reba-2", "prompteol", "classical+whitened"], MANY)
    kept = None if directory is None else TensorCache(directory)
    made = compare(
        Recipes(CausalTransformer(path), asked, batch_size=4, kept=kept), PAIRS, OddOneOutEvaluator([CAT, DOG])
    )
    # What is measured with a clock is never the same.
    results = [dataclasses.replace(result, cost=None, sentences_per_second=None) for result in made.results]
    return dataclasses.replace(made, results=results, answer="", use="", verdict=[]).as_json()


@pytest.mark.skipif(sys.platform == "win32", reason="a process is forked to be killed")
@pytest.mark.filterwarnings("ignore:There is no interval")
def test_a_run_that_was_killed_goes_on_to_the_same(shallow_path, tmp_path, monkeypatch):
    time_once(monkeypatch)
    whole = compared(shallow_path, None)
    moved, replace = [], os.replace

    def dying(source, target):
        moved.append(target)
        if len(moved) == 9:
            # In the middle of a file, which is written and not yet in its place.
            processes.die()
        replace(source, target)

    def first(patch):
        patch.setattr(os, "replace", dying)
        compared(shallow_path, tmp_path)

    processes.killed_in(first)
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
    assert len(list(tmp_path.glob(".writing-*"))) == 1
    assert compared(shallow_path, tmp_path) == whole
    assert not list(tmp_path.glob(".writing-*"))
    for run in (ModulePass, SweepPass):
        monkeypatch.setattr(run, "encode", raising(AssertionError()))
    monkeypatch.setattr("st_reba.compare.recipes.encode_words", raising(AssertionError()))
    assert compared(shallow_path, tmp_path) == whole


def test_other_weights_and_other_settings_are_not_taken_for_these(roomy_path, tmp_path):
    files = set()
    backbone = CausalTransformer(roomy_path)
    for change in ("nothing", "batch", "weights", "length"):
        if change == "weights":
            with torch.no_grad():
                next(backbone.model.parameters()).mul_(1.5)
        if change == "length":
            backbone.max_seq_length = 5
        batch_size = 3 if change == "batch" else 4
        recipes = Recipes(backbone, asked_for(["classical"]), batch_size=batch_size, kept=TensorCache(tmp_path))
        recipes.add(TEXTS)
        now = set(tmp_path.glob("*.safetensors"))
        # The bag, and the classical embedding.
        assert len(now - files) == 2, change
        files = now


# tf-idf


@given(
    st.lists(st.text("ab d猫"), min_size=1, max_size=6), st.text("abcd猫", min_size=1), st.text("abcd猫", min_size=1)
)
def test_naively(roomy, fit_texts, first, second):
    """With tokens, too, that no text had which idf was counted on."""
    counted = [set(own.ids) for own in tokens_of(roomy, fit_texts) if own.ids]

    def weighed(text):
        tf = Counter(tokens_of(roomy, [text])[0].ids)
        df = {token: sum(token in text for text in counted) for token in tf}
        return {token: count * (math.log((1 + len(counted)) / (1 + df[token])) + 1) for token, count in tf.items()}

    one, other = weighed(first), weighed(second)
    product = sum(value * other.get(token, 0) for token, value in one.items())
    expected = product / math.hypot(*one.values()) / math.hypot(*other.values())
    assert TfIdf(roomy, fit_texts).cosines([first], [second])[0] == pytest.approx(expected, abs=1e-12)


def test_a_text_without_tokens_is_like_nothing(roomy):
    tf_idf = TfIdf(roomy, ["", *TEXTS])
    assert tf_idf.cosines(["", "", TEXTS[0]], ["", TEXTS[0], TEXTS[0]]) == pytest.approx([0, 0, 1])


def test_the_nearest_are_those_of_the_highest_cosine(roomy):
    tf_idf = TfIdf(roomy, TEXTS)
    documents = [*TEXTS, TEXTS[1]]
    for query, found in zip(TEXTS, tf_idf.nearest(TEXTS, documents, 4), strict=True):
        cosines = tf_idf.cosines([query] * len(documents), documents)
        order = sorted(range(len(documents)), key=lambda index: (-cosines[index], index))
        assert [index for index, _ in found] == order[:4]
        assert [score for _, score in found] == pytest.approx(cosines[order[:4]])


def test_texts_of_the_same_tokens_are_equals(roomy):
    """Whatever rounding makes of them: a rank correlation would else order them by chance."""
    pairs = read_pairs(demo_pairs("en"))
    tf_idf = TfIdf(roomy, pairs.texts())
    assert set(tf_idf.cosines(pairs.first, pairs.first)) == {1.0}
    assert tf_idf.nearest(pairs.first[:1], pairs.first[:1] * 3, 3) == [[(0, 1.0), (1, 1.0), (2, 1.0)]]


PASSES = ["classical", "reba-2", "prompteol", "knowledge", "value-aggregation", "early-late", "classical@1"]


@pytest.mark.parametrize("name", PASSES)
def test_the_tokens_of_a_pass_are_those_that_run(roomy, name):
    """Counted where they enter each layer."""
    module = find(name).build(roomy)
    ran = []
    with torch.inference_mode():
        # What stands before all texts is run here, once.
        module(module.preprocess([ALL_TEXTS[0]]))
        for layer in module.lm.layers:
            layer.register_forward_pre_hook(lambda layer, args: ran.append(args[0].shape[:2].numel()))
        for text in ALL_TEXTS:
            module(module.preprocess([text]))
    assert tokens(module, ALL_TEXTS, roomy) == pytest.approx(sum(ran) / depth(roomy.model), rel=0.1)
    # Of many texts some are counted.
    assert tokens(module, 40 * ALL_TEXTS, roomy) == pytest.approx(40 * tokens(module, ALL_TEXTS, roomy), rel=0.1)


SPEEDS = [
    # The first readies what is made once; one text says how many are measured, for some seconds.
    (0.01, [1, 1, 8, 8, 8, 8, 8]),
    (0.2, [1, 1, 8, 8]),
    (0.8, [1, 1, 2, 2]),
    (4.0, [1, 1, 1]),
]


@pytest.mark.parametrize(("seconds", "sizes"), SPEEDS)
def test_a_speed_is_measured_in_a_moment(monkeypatch, seconds, sizes):
    """``seconds`` a text of 3 tokens, on a machine that does something else half of the time."""
    embedded: list[int] = []
    clock = [0.0]

    class Pass:
        def tokens(self, texts):
            return 3 * len(texts)

        def encode(self, texts, prompt, batch_size):
            embedded.append(len(texts))
            clock[0] += seconds * len(texts)

    class Failing(Pass):
        encode = raising(IndexError())

    clocks = {"perf_counter": lambda: clock[0], "process_time": lambda: 0.5 * clock[0]}
    monkeypatch.setattr(cost, "time", SimpleNamespace(**clocks))
    recipes = SimpleNamespace(passes=[Failing(), Pass()], batch_size=8)
    found = speed(recipes, [f"text {number}" for number in range(20)])
    assert found == pytest.approx((3 / seconds, 6 / seconds))
    assert embedded == sizes


@pytest.mark.parametrize(("longest", "expected"), [(20, [11, 10, 9]), (400, [20, 19, 18])])
def test_recipes_are_timed_on_texts_of_mean_length(longest, expected):
    texts = [length * "a" for length in [*range(1, 20), longest]]
    assert [len(text) for text in timed_batch(texts, 3)] in (expected, [400, 19, 18])
    assert timed_batch(texts[:2], 8) == ["aa", "a"]


def test_memory_grows_with_the_model_and_what_is_made_on_the_way(roomy):
    weights, peak = memory(roomy, 20, 32, 2, random=False)
    assert weights == 4 * sum(parameter.numel() for parameter in roomy.model.parameters())
    assert peak > weights
    assert memory(roomy, 200, 32, 2, random=False)[1] > peak


FORECASTS = [(30_000, "30 seconds", "60 seconds"), (3e5, "5 minutes", "10 minutes"), (9e6, "2.5 hours", "5.0 hours")]


@pytest.mark.parametrize(("tokens", "duration", "twice"), FORECASTS)
def test_what_is_told(tokens, duration, twice):
    told = str(Forecast(8, 1955, tokens, 1000.0, 270_000_000, 1_250_000_000, 2 * tokens / 1000))
    assert told.startswith("8 recipes on 1,955 texts, with timings and any controls: ")
    assert f"tokens at 1,000 a second here, about {duration}, of the processor's time {twice}. Memory: " in told
    assert "about 1.2 GB at the peak, of which 0.3 GB" in told
