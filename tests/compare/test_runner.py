from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoModel

from st_reba import CausalTransformer, encode_words
from st_reba.compare import reader, timing
from st_reba.compare.reader import RecipeReader
from st_reba.compare.runner import Recipes
from st_reba.compare.timing import TIMED_BATCHES, TIMED_ROUNDS, TIMED_TEXTS, timed_batches
from st_reba.data.demo import demo_sentences
from st_reba.evaluation.store import EmbeddingStore
from st_reba.lm.anatomy import TOKENS
from st_reba.recipes import asked_for, default_recipes, random_weights
from st_reba.recipes.rows import FILTERS, IDF, PARTS, PARTWISE, SUM

from .. import backbones
from ..backbones import TEXTS as ALL_TEXTS
from ..conftest import examples, relative_error

TEXTS = ALL_TEXTS[:3]
# More of them than there are dimensions, and short.
FIT_TEXTS = [
    f"{place} {text[:12]}" for place, text in enumerate([*demo_sentences("en")[:40], *demo_sentences("zh")[:10]])
]
SENTENCES, WORDS = ["a cat ran", "the cat sat", "my dog eats"], ["cat", "cat", "dog"]


@pytest.fixture(scope="module")
def backbone(roomy_path):
    return CausalTransformer(roomy_path)


@pytest.fixture(scope="module")
def recipes(backbone):
    done = []
    made = Recipes(
        backbone,
        default_recipes(fit_texts=FIT_TEXTS),
        batch_size=2,
        on_progress=lambda what, tokens: done.append((what, tokens)),
    )
    return made, done


@pytest.fixture(scope="module")
def few(backbone):
    """Some of them: of each way to run the model one, and what is fitted."""
    done = []
    names = ("Classical", "Classical, whitened", "ReBA-2", "RT-2", "PromptEOL")
    made = Recipes(
        backbone,
        [recipe for recipe in default_recipes(fit_texts=FIT_TEXTS) if recipe.name in names],
        batch_size=2,
        on_progress=lambda what, tokens: done.append((what, tokens)),
    )
    return made, done


def test_every_recipe_as_it_is_alone(recipes, backbone):
    made, done = recipes
    before = len(done)
    found = made.embed(TEXTS, "query: ")
    # One for each way to run the model.
    assert {what for what, _ in done[before:]} == {"Embedding"}
    assert 10 < len(done) - before < len(found)
    assert list(found) == made.keys == [recipe.result for recipe in made.all]
    for recipe in made.all:
        alone = recipe.model(backbone)
        assert relative_error(found[recipe.result], alone.encode(TEXTS, prompt="query: ")) < 1e-5, recipe.result


def test_one_recipe_at_two_layers(backbone):
    made = Recipes(backbone, asked_for(["echo-2@1", "echo-2@2"]), controls=False)
    found = made.embed(TEXTS)
    assert len(found) == 4
    for recipe in made.all:
        assert relative_error(found[recipe.result], recipe.model(backbone).encode(TEXTS)) < 1e-5, recipe.result


def test_words_of_every_recipe_as_they_are_alone(recipes, backbone):
    made, done = recipes
    found = made.words(SENTENCES, WORDS)
    assert done[-1][0] == "Words"
    assert set(found) == {recipe.name for recipe in made.all if recipe.words}
    for recipe in made.all:
        if recipe.words and recipe.pooling == "mean":
            alone = recipe.model(backbone)
            assert relative_error(found[recipe.name], encode_words(alone, SENTENCES, WORDS)) < 1e-5, recipe.result


def test_the_bag_stands_beside_the_recipes(recipes):
    made, _ = recipes
    own = [recipe.result for recipe in made.all if not recipe.control]
    # The tiny backbone was saved without its head.
    assert own == [recipe.result for recipe in default_recipes() if recipe.part != PARTS["filtered"]]
    around = ["", *(f", {name}" for name in (PARTWISE, SUM, *FILTERS, IDF) if name != "filtered")]
    bags = [f"Bag of input embeddings{name}, mean" for name in around]
    assert made.controls == bags


def test_some_on_random_weights(few, backbone):
    """Each as it is alone; and the trained weights are out of memory meanwhile, and back at the end."""
    made, _ = few
    before = made.embed(TEXTS)
    keys = ["Classical, whitened, last", "ReBA-2, mean", "PromptEOL, last"]
    with made.on_random_weights(keys) as controls:
        assert sum(parameter.numel() for parameter in backbone.model.parameters()) == 0
        bags = [recipe.result for recipe in made.all if recipe.bag]
        assert (
            controls.keys == controls.controls == [f"Random weights, {key}" for key in made.keys if key in bags + keys]
        )
        found, words = controls.embed(TEXTS), controls.words(SENTENCES, WORDS)
    after = made.embed(TEXTS)
    assert all(torch.equal(before[key], after[key]) for key in made.keys)
    random = random_weights(backbone)
    for recipe in controls.all:
        alone = recipe.model(random)
        assert relative_error(found[recipe.result], alone.encode(TEXTS)) < 1e-5, recipe.result
        if recipe.words:
            assert relative_error(words[recipe.name], encode_words(alone, SENTENCES, WORDS)) < 1e-5


def test_one_pass_for_all_filters_and_poolings(backbone, monkeypatch):
    """Six filters behind two poolings and the bag, on texts that are embedded by each once."""
    texts = [f"{text} {number}" for number in range(6) for text in TEXTS]
    asked = [recipe for recipe in default_recipes(1, texts) if recipe.filter and recipe.method == "Classical"]
    passes = []
    for owner, name in ((reader.RecipeSweep, "encode"), (SentenceTransformer, "encode")):
        encode = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda self, texts, *args, encode=encode, **kwargs:
            passes.append(len(texts)) or encode(self, texts, *args, **kwargs),
        )  # fmt: skip
    made = Recipes(backbone, asked)
    assert not [key for key, _ in made.skipped if "filtered" not in key]
    assert len(made.all) > 10
    assert passes == [len(texts)] * 2


def test_the_bag_on_random_weights_is_one_of_gaussian_vectors(few, backbone):
    made, _ = few
    vectors = random_weights(backbone).model.get_input_embeddings().weight
    standard = (vectors / vectors.std()).flatten()
    assert standard.mean().abs() < 0.03
    assert scipy.stats.kstest(standard.detach().numpy(), "norm").pvalue > 0.01
    ids = backbone.token_ids(TEXTS[:1])[0]
    with made.on_random_weights([]) as controls:
        found = controls.embed(TEXTS[:1])["Random weights, Bag of input embeddings, mean"][0]
    assert relative_error(found, vectors[ids].mean(dim=0).detach()) < 1e-5


def test_one_round_is_enough_where_it_takes_long(few, monkeypatch):
    rounds = itertools.count()
    work = itertools.count(step=2)
    clocks = {"perf_counter": lambda: float(6 * next(rounds)), "process_time": lambda: float(next(work))}
    monkeypatch.setattr(timing, "time", SimpleNamespace(**clocks))
    made, done = few
    before = len(done)
    seconds = made.costs(TEXTS)
    batches = len(timed_batches(TEXTS, made.batch_size))
    assert all(spent == pytest.approx(2 * batches / len(TEXTS)) for spent in seconds.values())
    # One before and one after the round; and two of the processor's for each batch of each.
    assert (next(rounds), next(work) / 2) == (2, 2 * batches * len(seconds))
    # What is not run again counts as done.
    assert done[before:] == done[before : before + len(seconds)] * TIMED_ROUNDS
    assert {what for what, _ in done[before:]} == {"Timing"}


def test_costs_are_of_what_is_trained(few):
    made, done = few
    before = len(done)
    seconds = made.costs(TEXTS)
    assert [what for what, _ in done[before:]] == ["Timing"] * TIMED_ROUNDS * len(seconds)
    assert set(seconds) == set(made.keys)


def test_the_unit_is_timed_though_it_is_not_compared(backbone):
    made = Recipes(backbone, [recipe for recipe in default_recipes(2) if recipe.result == "ReBA-2, last"])
    seconds = made.costs(TEXTS)
    assert set(seconds) == {"Classical, mean", "Classical, last", "Bag of input embeddings, mean", "ReBA-2, last"}
    assert all(spent > 0 for spent in seconds.values())


def test_what_else_runs_on_a_processor_is_no_cost(monkeypatch):
    """Of each batch the fastest round; on another device the clock is all there is."""
    now = {"clock": 0.0, "processor": 0.0}
    clocks = {"perf_counter": lambda: now["clock"], "process_time": lambda: now["processor"]}
    monkeypatch.setattr(timing, "time", SimpleNamespace(**clocks))
    waits = itertools.cycle([4.0, 0.5])

    class Model:
        def encode(self, batch, **settings):
            now["processor"] += 0.1 * len(batch)
            now["clock"] += 0.1 * len(batch) + next(waits)

    batches = [["a", "b"]]
    assert timing.costs({"a": Model()}, batches)["a"] == pytest.approx(0.1)
    assert timing.costs({"a": Model()}, batches, on_cpu=False)["a"] == pytest.approx(0.35)


def test_what_was_embedded_is_noted(backbone, token_ids):
    made = Recipes(backbone, default_recipes()[:1])
    made.embed(TEXTS[:2])
    made.embed(TEXTS[2:] * 30)
    assert made.lengths == [len(token_ids(text)) for text in [*TEXTS[:2], *TEXTS[2:] * 30]]
    assert made.sample == [*TEXTS[:2], *TEXTS[2:] * 30]


def test_the_sample_is_drawn_evenly(backbone):
    """Evaluators give the longest texts first: what is timed must not be those alone."""
    made = Recipes(backbone, default_recipes()[:1])
    made.embed = lambda texts: Recipes._sample(made, texts) or made.lengths.extend([1] * len(texts))
    for number in range(100):
        made.embed([str(number)] * 50)
    assert len(made.sample) == 1024
    assert np.mean([int(text) for text in made.sample]) == pytest.approx(49.5, abs=4)


@given(st.lists(st.text(max_size=9), min_size=1, max_size=200), st.integers(1, 64))
@settings(max_examples=examples(50))
def test_timed_batches(texts, batch_size):
    batches = timed_batches(texts, batch_size)
    assert len(batches) <= TIMED_BATCHES
    sizes = [len(batch) for batch in batches]
    assert sum(sizes) == min(len(texts), TIMED_BATCHES * min(batch_size, TIMED_TEXTS))
    assert not Counter(text for batch in batches for text in batch) - Counter(texts)
    lengths = [len(text) for batch in batches for text in batch]
    assert lengths == sorted(lengths, reverse=True)


def test_what_is_timed_is_as_long_as_the_data(backbone, monkeypatch):
    """A few long texts among many short ones."""
    texts = [" ".join(["cat"] * (40 if number % 20 == 0 else 1 + number % 15)) for number in range(300)]
    made = Recipes(backbone, default_recipes(1)[:1])
    with EmbeddingStore(made.embed, batch_size=32) as store:
        store.look_up("Classical, mean", texts)
    timed = []
    encode = SentenceTransformer.encode
    monkeypatch.setattr(
        SentenceTransformer, "encode", lambda self, batch, **kw: timed.append(list(batch)) or encode(self, batch, **kw)
    )
    made.costs(made.sample)
    words = [len(text.split()) for batch in timed for text in batch]
    assert np.mean(words) == pytest.approx(np.mean([len(text.split()) for text in set(texts)]), rel=0.25)
    assert np.mean(words) < 20


@pytest.mark.filterwarnings("ignore:.*in its own code")
def test_recipes_that_a_backbone_cannot_run_are_left_out(backbone_path):
    made = Recipes(CausalTransformer(backbone_path("bloom")), default_recipes(fit_texts=FIT_TEXTS))
    names = {recipe.method for recipe in made.all}
    assert {"Classical", "Echo-3", "ReBA-3"} <= names
    skipped = dict(made.skipped)
    assert "cannot be made to attend both ways" in skipped["Bidirectional, mean"]
    assert "RT-2, last" in skipped
    found = made.embed(TEXTS[:1])
    assert set(found) == {recipe.result for recipe in made.all}


def test_a_backbone_without_attention(backbone_path, monkeypatch):
    """Then no sweep can be made, and what needs no attention still runs, on its own."""

    def refuse(*args, **kwargs):
        raise ValueError("no attention")

    monkeypatch.setattr("st_reba.compare.reader.RecipeSweep", refuse)
    backbone = CausalTransformer(backbone_path())
    recipes = [recipe for recipe in default_recipes() if recipe.name in ("Classical", "Echo-2")]
    reader = RecipeReader(backbone, recipes)
    found = reader.embed(TEXTS)
    for recipe in recipes:
        assert np.array_equal(found[recipe.result], recipe.model(backbone).encode(TEXTS, convert_to_tensor=True))
    assert set(reader.words(SENTENCES, WORDS)) == {"Classical", "Echo-2"}


def test_setting_up_every_recipe_tries_each_backbone_out_a_few_times(tmp_path):
    """Once a fact, and once a depth that is read, twice where a prompt stands before the text there."""
    config = backbones.config("llama")
    config.max_position_embeddings, config.num_hidden_layers = 2048, 16
    path = backbones.save(AutoModel.from_config(config).eval(), tmp_path, model_max_length=2048)
    tries: list[nn.Module] = []

    def note(module, args) -> None:
        if isinstance(module, nn.Embedding) and args[0].dim() == 2 and args[0].shape[1] <= len(TOKENS[0]):
            tries.append(module)

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        # Too few for the filters, whose recipes are made all the same.
        recipes = Recipes(CausalTransformer(path), default_recipes(fit_texts=["a cat ran home", "the dogs sat down"]))
    finally:
        hook.remove()
    assert {recipe.name for recipe in recipes.all} >= {"ReBA-3", "RT-8", "Knowledge", "CK", "Token prepending"}
    assert len(tries) <= 14
