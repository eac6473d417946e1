"""The rows as data, how recipes are asked for, and what the class of a recipe says of itself."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

import st_reba
from st_reba import CausalTransformer, Row
from st_reba.compare import Recipes
from st_reba.compare.answer import WITHOUT
from st_reba.data.demo import demo_sentences
from st_reba.modules import CausalModule
from st_reba.reading.chunks import _reader
from st_reba.recipes import asked_for, default_recipes, every_row, find, lookup, random_weights, worth_trying
from st_reba.recipes.lookup import bags_of_input_embeddings, matching
from st_reba.recipes.rows import BAG, FILTERS, IDF, PARTWISE, POST_PROCESSORS, SUM

from ..backbones import TEXTS
from ..conftest import pipeline
from ..modules.methods import PUBLIC_MODULES

DOCS = Path(__file__).parents[2] / "docs"


def test_each_row_is_told_from_all_others():
    every = every_row(64)
    assert len({row.key for row in every}) == len({row.name for row in every}) == len(every)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row.key) for row in every)
    assert {row.module for row in every} <= {*PUBLIC_MODULES}


@pytest.mark.parametrize("row", every_row(), ids=lambda row: row.key)
def test_what_a_row_says(row):
    assert row.description
    assert not row.description.endswith(".")
    assert getattr(st_reba, row.module.__name__) is row.module
    assert set(row.settings) <= {*row.module.config_keys}
    assert set(row.tried) <= set(row.poolings)
    assert (DOCS / "methods" / f"{row.page}.md").is_file()
    # It is known by its module and settings.
    assert matching(row.module, dict(row.settings)) == row


def test_what_is_compared_by_default_is_what_the_documentation_names_first():
    page = (DOCS / "choose.md").read_text(encoding="utf-8")
    table = re.sub(r"\(.*?\)", "", page.partition("## What to try first")[2].partition("\n## ")[0])
    cells = [line.split("|")[2].lower() for line in table.splitlines() if line.startswith("|")]
    named = {row.key for row in every_row() if any(row.name.lower() in cell for cell in cells)}
    tried = {row.key for row in every_row() if row.tried}
    # Beside what one has without a recipe; the long prompt of Knowledge takes half as long as all the others together.
    assert tried - {"classical"} == named - {"knowledge", "classical"}


#: Recipes that have no row under last pooling, and the ones that they equal there.
SAME_IF_LAST = {"ReBA-1": "Classical", "Bidirectional": "Classical", "Echo-2, bidirectional": "Echo-2"}


def test_the_recipes():
    recipes = default_recipes()
    keys = [recipe.result for recipe in recipes]
    assert len(set(keys)) == len(keys)
    assert {f"Classical, {name}, {pooling}" for name in FILTERS for pooling in ("mean", "last")} <= set(keys)
    assert {f"Classical, {IDF}, mean", f"Early and late, {PARTWISE}, mean", f"Echo topic, {SUM}, mean"} <= set(keys)
    assert not any(recipe.control for recipe in recipes)
    # Under last pooling these equal another recipe.
    assert not set(keys) & {f"{name}, last" for name in SAME_IF_LAST}
    worded = {recipe.name for recipe in recipes if recipe.words}
    assert {"Classical", "Echo-2", "ReBA-1", "ReBA-2", "Bidirectional", "ReBA-2, bidirectional"} <= worded
    assert not worded & {"PromptEOL", "RT-2", "MetaEOL", "KV re-routing", "Value aggregation", "Contrastive prompting"}


@pytest.mark.parametrize("architecture", ["llama", "mistral_window"])
def test_recipes_without_a_row_for_last_pooling_equal_another_one(architecture, backbone_path):
    backbone = CausalTransformer(backbone_path(architecture))
    for alike in SAME_IF_LAST.items():
        modules = [find(name).build(backbone) for name in alike]
        last = [torch.as_tensor(pipeline(module, "lasttoken").encode(TEXTS)) for module in modules]
        mean = [torch.as_tensor(pipeline(module).encode(TEXTS)) for module in modules]
        assert torch.cosine_similarity(*last).min() > 1 - 1e-5
        assert torch.cosine_similarity(*mean).min() < 1 - 1e-3


def test_ten_are_worth_trying(roomy_path):
    """And all of them run."""
    few = asked_for(["few"], demo_sentences()[:40])
    assert len({recipe.result for recipe in few}) == len(few) == 10
    # What one has without a recipe, which the answer holds the others against.
    assert WITHOUT.keys() <= {recipe.result for recipe in few}
    assert not Recipes(CausalTransformer(roomy_path), few, controls=False).skipped


def test_random_weights_are_other_weights_of_the_same_shape_with_a_head_of_their_own(backbone_path):
    """Untied models would else lend a control's filter the head of the checkpoint."""
    backbone = CausalTransformer(backbone_path())
    before = torch.random.get_rng_state()
    backbone.processing_kwargs = {"text": {"max_length": 3}}
    control, again = random_weights(backbone), random_weights(backbone)
    assert control.processing_kwargs == backbone.processing_kwargs
    assert torch.equal(torch.random.get_rng_state(), before)
    own, others = backbone.model.state_dict(), control.model.state_dict()
    assert {name: value.shape for name, value in own.items()} == {name: value.shape for name, value in others.items()}
    assert not torch.equal(own["embed_tokens.weight"], others["embed_tokens.weight"])
    assert np.array_equal(*(pipeline(module).encode(TEXTS) for module in (control, again)))
    assert not backbone.model.config.tie_word_embeddings
    expected = st_reba.build(control, "classical+filtered", device="cpu")[2]
    weight = control.model.get_input_embeddings().weight.double()
    values = torch.linalg.svdvals(weight @ expected.directions.double().T)
    middle = torch.linalg.svdvals(weight)[expected.low : expected.low + len(values)]
    assert torch.allclose(values, middle, rtol=1e-4)


def test_whatever_a_table_shows_is_found_by_its_name_and_by_its_key():
    shown = [*default_recipes(), *worth_trying(), find("echo-5")]
    for recipe in [*shown, *bags_of_input_embeddings(shown)]:
        for name in (recipe.name, recipe.key):
            found = find(name)
            assert (found.name, found.key) == (recipe.name, recipe.key)


def test_a_key_goes_on_with_a_layer_and_a_part():
    recipe = find("reba-2@3+all-but-the-top")
    assert (recipe.row.key, recipe.layer, recipe.post_processor.name) == ("reba-2", 3, "all but the top")
    assert find("ReBA-2, layer 3, all but the top") == recipe
    assert find("early-late").post_processor.name == PARTWISE
    assert find("early-late+whitened").post_processor.name == "whitened"
    assert find("classical+idf-weighted").poolings == ("mean",)


NO_RECIPES = [
    ("", r"There is no recipe ''\. `st-reba recipes` lists them, and what may follow a key\."),
    ("echo_topic", r"There is no recipe 'echo_topic'\. Near it: echo-topic\. `st-reba recipes` lists them"),
    ("reba-2+upside-down", "There is no recipe"),
    ("Random weights, Classical, whitened", "is a control, to be compared with"),
    ("PromptEOL, idf-weighted", "idf-weighted goes with mean pooling, and PromptEOL has last pooling; leave it ou"),
]


@pytest.mark.parametrize(("name", "message"), NO_RECIPES)
def test_what_is_no_recipe_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find(name)


def test_those_that_are_asked_for():
    keys = [recipe.result for recipe in asked_for(["reba-2, prompteol", "Echo-2, bidirectional", "reba-2"])]
    assert keys == [
        "ReBA-2, mean", "ReBA-2, last", "PromptEOL, last", "Echo-2, bidirectional, mean",
    ]  # fmt: skip
    assert asked_for(["few"]) == worth_trying()
    assert asked_for(["all"]) == default_recipes()
    (early_late,) = asked_for(["early-late"], ["a", "b"])
    assert early_late.fit_texts == ("a", "b")


def test_the_description_of_a_recipe():
    copies = "The text occurs 2 times, and its last copy is read"
    whitened = "the principal directions of a sample of plain texts, scaled to nearly one variance."
    assert find("echo-2@3+whitened").description == f"{copies}; read after layer 3, where the model stops; {whitened}"
    bag = replace(find(BAG.name), post_processor=POST_PROCESSORS["whitened"]).on_random_weights()
    assert bag.description.startswith("The same architecture and tokenizer with weights that were never trained; ")


#: The first recipe of each class. What a class forgets to say of itself would be what the class above it says.
EACH_CLASS = list({row.module: row for row in reversed(every_row())}.values())
each_class = pytest.mark.parametrize("row", EACH_CLASS, ids=lambda row: row.module.__name__)


@each_class
def test_a_class_that_reads_in_its_own_way_has_a_name_and_an_equation_of_its_own(row):
    """Model cards have them."""
    above = [other for other in row.module.__mro__[1:] if issubclass(other, CausalModule)]
    if any("read" in vars(other) for other in above):
        for name in ("method", "equation"):
            said = getattr(row.module, name)
            assert all(said != getattr(other, name, None) for other in above), f"{row.module.__name__}.{name}"


@each_class
def test_a_text_whose_chunks_are_read_has_a_vector_for_each_token(row, roomy):
    model = pipeline(find(row.key).build(roomy).eval())
    with contextlib.suppress(ValueError), torch.no_grad():  # others are refused
        reader = _reader(model)
        [layout] = reader.lay_out(TEXTS[2:3])
        count = reader(reader.preprocess(TEXTS[2:3]))["token_embeddings"].shape[1]
        assert count >= (layout.copy_index == 0).sum()


# Modules of other people's: they load, and stand in comparisons, by their own import

THEIRS = '''
import st_reba

class TheirModule(st_reba.CausalTransformer):
    """Reads a text as they do.

    And more.
    """

st_reba.register(TheirModule)
'''


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """``theirs(source)``: their package, imported."""
    before = list(lookup._registered)
    monkeypatch.syspath_prepend(tmp_path)

    def made(source=THEIRS):
        (tmp_path / "theirs.py").write_text(source, encoding="utf-8")
        importlib.invalidate_caches()
        return importlib.import_module("theirs")

    yield made
    sys.modules.pop("theirs", None)
    lookup._registered[:] = before
    lookup._by_key.cache_clear()


def test_their_models_load_by_their_import(theirs, backbone_path, tmp_path):
    model = pipeline(theirs().TheirModule(backbone_path()))
    model.save_pretrained(str(tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "modules.json").read_text())[0]["type"] == "theirs.TheirModule"
    loaded = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert type(loaded[0]).__name__ == "TheirModule"
    assert np.array_equal(loaded.encode(TEXTS), model.encode(TEXTS))


def test_their_recipes_are_compared(theirs, backbone_path):
    theirs()
    row = every_row()[-1]
    assert (row.key, row.name, row.description) == ("their-module", "TheirModule", "Reads a text as they do")
    assert [recipe.result for recipe in default_recipes()].count("TheirModule, mean") == 1
    assert find("TheirModule").row is row
    made = Recipes(CausalTransformer(backbone_path()), asked_for(["their-module", "classical"], TEXTS))
    assert np.allclose(*(made.matrix(find(key), TEXTS) for key in ("their-module", "classical")), atol=1e-5)


def test_recipes_of_their_own(theirs):
    row = 'register(TheirModule, st_reba.Row("a", "A", TheirModule, "as a"))'
    module = theirs(THEIRS.replace("register(TheirModule)", row)).TheirModule
    assert [(row.key, row.description) for row in every_row() if row.module is module] == [("a", "as a")]
    assert find("a").description == "As a."
    # Again, as a notebook does.
    st_reba.register(module, Row("b", "B", module, "as b"))
    assert [row.key for row in every_row() if row.module is module] == ["b"]
    for key, name in (("reba-2", "Mine"), ("mine", "PromptEOL"), ("reba-9", "Nine")):
        with pytest.raises(ValueError, match="already: give another key and name"):
            st_reba.register(module, Row(key, name, module, ""))


CAPITALS = [("DoubleEOL", "double-eol"), ("KVMean2", "kv-mean2"), ("Layer_Mean", "layer-mean")]


@pytest.mark.parametrize(("name", "key"), CAPITALS)
def test_capitals_stay_together_in_a_key(name, key, theirs):
    theirs(THEIRS.replace("TheirModule", name))
    assert every_row()[-1].key == key


def test_a_description_may_end_in_a_full_stop(theirs):
    module = theirs().TheirModule
    row = Row("a", "A", module, "as a.", settings={"rows": "last", "model_kwargs": {}}, poolings=("last",))
    st_reba.register(module, row)
    assert (find("a").pooling, find("a").description) == ("last", "As a.")
    assert find("a").row is row


def test_what_can_be_registered():
    class Local(CausalTransformer):
        pass

    with pytest.raises(ValueError, match="Local is defined in .*Define it at the top of a module that can be imported"):
        st_reba.register(Local)
    for other in (nn.Linear, "theirs.TheirModule"):
        with pytest.raises(TypeError, match="give a class derived from"):
            st_reba.register(other)
