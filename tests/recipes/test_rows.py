"""The rows as data, and how recipes are asked for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import st_reba
from st_reba import CausalTransformer, EchoModule
from st_reba.compare.search import candidates
from st_reba.modules.changes import Steer
from st_reba.recipes import asked_for, default_recipes, every_row, find, worth_trying
from st_reba.recipes.lookup import bags_of_input_embeddings, changed, controls_of, matching
from st_reba.recipes.rows import BAG, PARTS

from ..catalogued import PUBLIC_MODULES

DOCS = Path(__file__).parents[2] / "docs" / "methods"


def test_each_row_is_told_from_all_others():
    every = every_row(64)
    assert len({row.key for row in every}) == len({row.name for row in every}) == len(every)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row.key) for row in every)


@pytest.mark.parametrize("row", every_row(), ids=lambda row: row.key)
def test_what_a_row_says(row):
    assert row.says
    assert not row.says.endswith(".")
    assert row.module in PUBLIC_MODULES
    assert getattr(st_reba, row.module.__name__) is row.module
    assert set(row.settings) <= {*row.module.config_keys}
    assert set(row.tried) <= set(row.poolings)
    assert (DOCS / f"{row.page}.md").is_file()


def test_what_is_compared_by_default_is_what_the_documentation_names_first():
    page = (DOCS.parent / "choose.md").read_text(encoding="utf-8")
    table = page.partition("## What to try first")[2].partition("\n## ")[0]
    cells = [line.split("|")[2].lower() for line in table.splitlines() if line.startswith("|")]
    named = {row.key for row in every_row() if any(row.name.lower() in cell for cell in cells)}
    tried = {row.key for row in every_row() if row.tried}
    # Beside what one has without a recipe; the long prompt of Knowledge takes half as long as all the others together.
    assert tried - {"classical"} == named - {"knowledge", "classical"}


def test_whatever_a_table_shows_is_found_by_its_name_and_by_its_key():
    shown = [*default_recipes(5), *worth_trying(), *candidates(12)]
    shown += bags_of_input_embeddings(shown)
    for recipe in shown:
        for name in (recipe.name, recipe.key):
            found = find(name)
            assert (found.name, found.key) == (recipe.name, recipe.key)


def test_a_row_under_a_change(backbone_path):
    """Is the module with that change."""
    backbone = CausalTransformer(backbone_path())
    module = find("echo-2-steered").build(backbone)
    assert isinstance(module, EchoModule)
    assert module.changes == EchoModule(backbone, changes=[Steer()]).changes
    assert find("Echo-2, re-routed, whitened").says == (
        "The text stands 2 times, and is read in its last copy; in the middle layers every token sees the last one's "
        "key and value; the principal directions of a sample of plain texts, scaled to nearly one variance."
    )
    assert find("echo-2-bidirectional").row is next(row for row in every_row() if row.name == "Echo-2, bidirectional")
    under = [row for base in every_row() for row in changed(base)]
    assert {row.module for row in under} <= {*PUBLIC_MODULES}
    assert len({row.key for row in [*under, *every_row()]}) == len({row.name for row in [*under, *every_row()]})


def test_a_key_goes_on_with_a_layer_and_a_part():
    recipe = find("reba-2@3+all-but-the-top")
    assert (recipe.row.key, recipe.layer, recipe.part.name) == ("reba-2", 3, "all but the top")
    assert (recipe.name, recipe.pooling) == ("ReBA-2, layer 3, all but the top", "mean")
    assert find("ReBA-2, layer 3, all but the top") == recipe
    assert find("RT-2, layer 3").key == "rt-2@3"
    assert find("early-late").part.name == "partwise whitened"
    assert find("early-late+whitened").part.name == "whitened"
    assert find("classical+idf-weighted").poolings == ("mean",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"There is no recipe .* or a key: classical, reba-1, echo-2.*\+whitened"),
        ("reba-2+upside-down", "There is no recipe"),
        ("tf-idf", "is a control, to be compared with"),
        ("Random weights, Classical, whitened", "is a control, to be compared with"),
        ("PromptEOL, idf-weighted", "idf-weighted goes with mean pooling, and PromptEOL has last pooling; leave it ou"),
    ],
)
def test_what_is_no_recipe_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find(name)


def test_those_that_are_asked_for():
    keys = [recipe.result for recipe in asked_for(["reba-2, prompteol", "Echo-2, bidirectional", "reba-2"])]
    assert keys == [
        "ReBA-2, mean", "ReBA-2, last", "PromptEOL, last", "Echo-2, bidirectional, mean", "Echo-2, bidirectional, last",
    ]  # fmt: skip
    assert asked_for(["few"], 3, ["a"]) == worth_trying(["a"])
    assert asked_for(["all"], 5, ["a"]) == default_recipes(5, ["a"])
    (early_late,) = asked_for(["early-late"], 3, ["a", "b"])
    assert early_late.fit_texts == ("a", "b")


def test_what_is_said_of_it_and_what_it_is_called():
    assert find("echo-2@3+whitened").says == (
        "The text stands 2 times, and is read in its last copy; read after layer 3, where the model stops; the "
        "principal directions of a sample of plain texts, scaled to nearly one variance."
    )
    bag = replace(find(BAG.name), part=PARTS["whitened"]).on_random_weights()
    assert bag.called == "the bag of random embeddings, whitened"
    assert bag.says.startswith("The same architecture and tokenizer with weights that were never trained; ")
    assert controls_of(bag) == ()
    assert [control.kind for control in controls_of(find(BAG.name))] == ["random"]
    assert find("prompteol").on_random_weights().called == "PromptEOL, last on random weights"


def test_a_recipe_is_known_by_its_module_and_settings():
    for row in every_row():
        assert matching(row.module, dict(row.settings)) == row
    assert matching(st_reba.ReBAModule, {"repetitions": 2, "layers": [0]}) is None
    assert matching(st_reba.ReBAModule, {"repetitions": 7}).name == "ReBA-7"
