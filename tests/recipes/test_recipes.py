from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers.util import cos_sim
from transformers import AutoModelForCausalLM

from st_reba import TEMPLATES, CausalTransformer, EarlyLateModule, EchoModule, EmbeddingFilter, ReBAModule
from st_reba.compare.answer import WITHOUT
from st_reba.compare.reader import RecipeReader
from st_reba.compare.runner import Recipes
from st_reba.data.demo import demo_sentences
from st_reba.recipes import Recipe, default_recipes, every_row, find, random_weights, worth_trying
from st_reba.recipes.lookup import bags_of_input_embeddings, controls_of, without_repeats
from st_reba.recipes.rows import FILTERS, IDF, PARTS, PARTWISE, SUM

from .. import backbones
from ..backbones import TEXTS
from ..conftest import long, pipeline, relative_error


def test_the_recipes():
    methods = ["Classical", "Echo-2", "Echo-3", "ReBA-1", "ReBA-2", "ReBA-3"]
    methods += ["Bidirectional", "Echo-2, bidirectional", "ReBA-2, bidirectional"]
    expected = {f"{method}, {pooling}" for method in methods for pooling in ("mean", "last")}
    expected -= {f"{method}, last" for method in ("ReBA-1", "Bidirectional", "Echo-2, bidirectional")}
    prompted = ["PromptEOL", "PromptEOL, Chinese", "Pretended CoT", "Knowledge"]
    wordless = ["Bidirectional, prompt", "RT-2", "RT-4", "RT-8", *prompted, "MetaEOL", "CK", "KV re-routing"]
    wordless += ["Token prepending", "Value aggregation", "Contrastive prompting"]
    expected |= {f"{method}, last" for method in wordless if method not in ("MetaEOL", "CK")}
    expected |= {"MetaEOL, mean", "CK, mean", "KV re-routing, mean", "Token prepending, blocks, mean"}
    expected |= {f"Classical, {name}, {pooling}" for name in FILTERS for pooling in ("mean", "last")}
    expected |= {f"Classical, {IDF}, mean", f"Early and late, {PARTWISE}, mean"}
    expected |= {f"Topic, {SUM}, last", f"Echo topic, {SUM}, mean"}
    recipes = default_recipes()
    keys = [recipe.result for recipe in recipes]
    assert expected <= set(keys)
    assert len(set(keys)) == len(keys)
    assert not any(recipe.control for recipe in recipes)
    # Rows that stand for several have no words: those differ.
    merged = {recipe.result: recipe.same_as for recipe in recipes if recipe.same_as}
    assert merged == {"Classical, last": ("ReBA-1", "Bidirectional"), "Echo-2, last": ("Echo-2, bidirectional",)}
    unworded = {recipe.method for recipe in recipes if not recipe.words and recipe.part is None and not recipe.same_as}
    assert set(wordless) <= unworded
    assert not unworded & set(methods)


@pytest.mark.parametrize("architecture", ["llama", "mistral_window", *map(long, ["gpt2", "gemma3", "gpt_oss_sinks"])])
def test_what_one_row_stands_for_is_the_same_by_definition(architecture, backbone_path):
    backbone = CausalTransformer(backbone_path(architecture))
    alone = {
        "Classical": backbone,
        "ReBA-1": ReBAModule(backbone, repetitions=1),
        "Bidirectional": CausalTransformer(backbone, bidirectional_layers=1),
        "Echo-2": EchoModule(backbone, repetitions=2),
        "Echo-2, bidirectional": EchoModule(backbone, repetitions=2, bidirectional_layers=1),
    }
    vectors = {name: pipeline(module, "lasttoken").encode(TEXTS) for name, module in alone.items()}
    unit = {name: own / np.linalg.norm(own, axis=1, keepdims=True) for name, own in vectors.items()}
    names = {row.key: row.name for row in every_row()}
    same = {row.name: names[row.same_if_last] for row in every_row() if row.same_if_last}
    assert same == {"ReBA-1": "Classical", "Bidirectional": "Classical", "Echo-2, bidirectional": "Echo-2"}
    for name, other in same.items():
        assert np.abs(unit[name] - unit[other]).max() < 1e-5, (name, other)
    # Under mean pooling they are not.
    assert relative_error(*(pipeline(alone[name]).encode(TEXTS) for name in ("Classical", "Bidirectional"))) > 1e-3


def test_a_row_stands_only_for_what_was_asked():
    asked = [Recipe(find(key).row, pooling) for key in ("classical", "echo-2", "bidirectional")
             for pooling in ("mean", "last")]  # fmt: skip
    kept = without_repeats(asked)
    assert [recipe.result for recipe in kept] == [
        recipe.result for recipe in asked if recipe.result != "Bidirectional, last"
    ]
    assert {recipe.result: recipe.same_as for recipe in kept if recipe.same_as} == {
        "Classical, last": ("Bidirectional",)
    }
    assert {recipe.result for recipe in kept if not recipe.words} == {"Classical, last"}
    alone = [recipe for recipe in asked if recipe.method == "Bidirectional"]
    assert without_repeats(alone) == alone


def test_ten_are_worth_trying():
    few = worth_trying()
    assert len({recipe.result for recipe in few}) == len(few) == 10
    # What one has without a recipe, which the answer holds the others against.
    assert WITHOUT.keys() <= {recipe.result for recipe in few}
    assert max(recipe.copies for recipe in few if recipe.copies) == 2
    assert not any(recipe.control for recipe in few)


@pytest.fixture(scope="module")
def roomy(roomy_path):
    return CausalTransformer(roomy_path)


def test_all_that_are_worth_trying_run(roomy):
    reader = RecipeReader(roomy, worth_trying(demo_sentences()[:40]))
    assert not reader.skipped
    texts = TEXTS[:3]
    for recipe, vectors in zip(reader.recipes, reader.embed(texts).values(), strict=True):
        assert relative_error(recipe.model(roomy).encode(texts), vectors) < 1e-5


def test_prompts_are_read_at_their_end_as_their_authors_do(roomy):
    prompted = {
        "PromptEOL": "prompteol",
        "PromptEOL, Chinese": "prompteol-zh",
        "Pretended CoT": "pretended-cot",
        "Knowledge": "knowledge",
    }
    modules = {recipe.method: recipe.build(roomy) for recipe in default_recipes() if recipe.method in prompted}
    assert modules.keys() == prompted.keys()
    for method, module in modules.items():
        assert (module.template, module.pool_over, module.rows) == (TEMPLATES[prompted[method]], "all", "last")
        assert module.normalize_text
        last_but_one = method in ("Pretended CoT", "Knowledge")
        assert (module.output_layer, module.final_norm) == ((2, False) if last_but_one else (None, True))


def test_ck_is_the_mean_of_two_prompts(roomy):
    recipes = {recipe.method: recipe for recipe in default_recipes()}
    parts = [recipes[method].model(roomy).encode(TEXTS) for method in ("Pretended CoT", "Knowledge")]
    assert relative_error(recipes["CK"].model(roomy).encode(TEXTS), np.mean(parts, axis=0)) < 1e-5


@pytest.mark.parametrize("repetitions", [1, 3, long(2), long(5)])
def test_no_more_copies_than_asked(repetitions, roomy):
    modules = [recipe.build(roomy) for recipe in default_recipes(repetitions)]
    assert max(module.copies for module in modules) == repetitions
    swept = [(recipe, module) for recipe, module in zip(default_recipes(repetitions), modules, strict=True)
             if recipe.copies is not None]  # fmt: skip
    assert [recipe.copies for recipe, _ in swept] == [module.copies for _, module in swept]


def test_controls_have_names_of_their_own():
    recipe = default_recipes()[0]
    control = recipe.on_random_weights()
    assert (control.name, control.result, control.control) == (
        "Random weights, Classical", "Random weights, Classical, mean", True,
    )  # fmt: skip
    assert control.row is recipe.row
    assert all(bag.control for bag in bags_of_input_embeddings(default_recipes()))


def test_random_weights_are_other_weights_of_the_same_shape(backbone_path):
    backbone = CausalTransformer(backbone_path())
    control = random_weights(backbone)
    assert control.tokenizer is backbone.tokenizer
    own, others = backbone.model.state_dict(), control.model.state_dict()
    assert {name: value.shape for name, value in own.items()} == {name: value.shape for name, value in others.items()}
    assert not torch.equal(own["embed_tokens.weight"], others["embed_tokens.weight"])
    before = torch.random.get_rng_state()
    vectors = [pipeline(random_weights(backbone)).encode(TEXTS) for _ in range(2)]
    assert np.array_equal(*vectors)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_filters_are_rows_of_their_own(tmp_path):
    recipes = [recipe for recipe in default_recipes(fit_texts=demo_sentences()[:12]) if recipe.part]
    assert {(recipe.name, recipe.pooling) for recipe in recipes} == {
        *((f"Classical, {name}", pooling) for name in FILTERS for pooling in ("mean", "last")),
        (f"Classical, {IDF}", "mean"),
        (f"Early and late, {PARTWISE}", "mean"),
        (f"Topic, {SUM}", "last"),
        (f"Echo topic, {SUM}", "mean"),
    }
    config = backbones.config("llama")
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    with_a_head = backbones.randomize(AutoModelForCausalLM.from_config(config).eval())
    backbone = CausalTransformer(backbones.save(with_a_head, tmp_path))
    reader = RecipeReader(backbone, recipes)
    found = reader.embed(TEXTS)
    assert not reader.skipped
    for recipe in recipes:
        assert relative_error(found[recipe.result], reader.model(recipe).encode(TEXTS)) < 1e-4
        # Fitted anew, on the same: a direction has no sign.
        alone = recipe.model(backbone).encode(TEXTS, convert_to_tensor=True).cpu()
        assert torch.allclose(cos_sim(found[recipe.result], found[recipe.result]), cos_sim(alone, alone), atol=1e-3)


def test_the_control_of_a_filter_reads_no_trained_head(backbone_path):
    """The head of a control on random weights is its own: untied models would else lend it that of the checkpoint."""
    backbone = CausalTransformer(backbone_path("llama"))
    assert not backbone.model.config.tie_word_embeddings
    control = random_weights(backbone)
    expected = EmbeddingFilter.from_language_model(control)
    weight = control.model.get_input_embeddings().weight.double()
    values = torch.linalg.svdvals(weight @ expected.directions.double().T)
    middle = torch.linalg.svdvals(weight)[expected.low : expected.low + len(values)]
    assert torch.allclose(values, middle, rtol=1e-4)


def test_early_and_late_stands_beside_controls_behind_the_same_filter(backbone_path):
    recipes = [recipe for recipe in default_recipes(fit_texts=demo_sentences()[:20]) if recipe.method != "Classical"]
    (recipe,) = [recipe for recipe in recipes if recipe.part == PARTS[PARTWISE]]
    made = Recipes(CausalTransformer(backbone_path()), [recipe])
    assert not made.skipped
    bag = f"Bag of input embeddings, {PARTWISE}, mean"
    found = {key: made.model(key) for key in made.keys}
    with made.on_random_weights([recipe.result]) as untrained:
        readers = (made, untrained)
        assert [key for reader in readers for key in reader.keys] == [
            "Bag of input embeddings, mean", bag, recipe.result, "Random weights, Bag of input embeddings, mean",
            f"Random weights, {bag}", f"Random weights, {recipe.result}",
        ]  # fmt: skip
        # What the bag has is one part, and what the recipe has are two: behind the prompt, on random weights, too.
        found.update({key: untrained.model(key) for key in untrained.keys})
        assert {key: model[2].shares for key, model in found.items() if len(model) > 2} == {
            recipe.result: [0.3, 0.7], f"Random weights, {recipe.result}": [0.3, 0.7],
            bag: [1], f"Random weights, {bag}": [1],
        }  # fmt: skip
        assert isinstance(found[f"Random weights, {recipe.result}"][0], EarlyLateModule)
    for reader in readers:
        for key, vectors in reader.embed(TEXTS).items():
            assert relative_error(vectors, found[key].encode(TEXTS)) < 1e-4, key
    # The verdict finds it as the control behind the same filter.
    assert [(control.kind, control.name, control.called) for control in controls_of(recipe)] == [
        ("tf-idf", "tf-idf, mean", "tf-idf, without any model"),
        ("bag", "Bag of input embeddings, mean", "the bag of input embeddings"),
        ("filtered bag", bag, f"the bag of input embeddings, {PARTWISE} as well"),
        ("random", f"Random weights, {recipe.result}", "itself on random weights"),
    ]
    assert recipe.filter.settings(found[recipe.result][0].shares) == {"shrinkage": 10.0, "shares": (0.3, 0.7)}


def test_the_bag_has_every_filter_and_weighting_too():
    recipes = [recipe for recipe in default_recipes() if recipe.method == "Classical"]
    names = [bag.result for bag in bags_of_input_embeddings(recipes)]
    assert names == [
        "Bag of input embeddings, mean", *(f"Bag of input embeddings, {name}, mean" for name in (*FILTERS, IDF)),
    ]  # fmt: skip
    assert len(bags_of_input_embeddings(recipes[:1])) == 1
