"""Recipes of the rebuilt package give what those of the old one give. It goes with the old."""

from __future__ import annotations

import pytest

from st_reba import recipes as new
from st_reba import recipes as old
from st_reba.build import build as new_build
from st_reba.data.demo import demo_sentences
from st_reba.ready import build as old_build
from st_reba.recipes import lookup as new_lookup
from st_reba.recipes import lookup as old_lookup

from ..backbones import TEXTS
from ..conftest import relative_error

FIT = [f"{text} {other}" for text in TEXTS for other in demo_sentences()[:8]]
KEYS = [*(row.key for row in old.every_row()), "prompteol-zh", "echo-topic-zh", "bag-of-input-embeddings"]
FILTERED = ["classical+whitened", "echo-2+idf-weighted", "prompteol+centred", "reba-2@2"]

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


OF_RECIPES = (
    "key", "name", "result", "method", "called", "poolings", "copies", "words", "fitted", "fitted_on", "same_as",
    "control", "settings",
)  # fmt: skip
OF_ROWS = ("settings", "repetitions", "end", "parts", "prompt_languages", "paper", "page", "cost", "tried", "chinese")


def shown(recipe):
    """All but the sentences, which are in other words."""
    row = recipe.row
    own = [getattr(recipe, name) for name in OF_RECIPES] + [getattr(row, name) for name in OF_ROWS]
    arguments = (row.with_own_template({"template": "so: {text}"}), row.arguments("last", 2))
    return (*own, row.module.__name__, *arguments)


def test_all_are_named_alike():
    for names in (["all"], ["few"], [*KEYS, *FILTERED]):
        before, after = (package.asked_for(names, 4, TEXTS) for package in (old, new))
        assert [*map(shown, before)] == [*map(shown, after)]
        before, after = (lookup.in_language(own, "zh") for lookup, own in ((old_lookup, before), (new_lookup, after)))
        assert [*map(shown, before)] == [*map(shown, after)]
        for one, other in zip(before, after, strict=True):
            controls = old_lookup.controls_of(one), new_lookup.controls_of(other)
            assert [vars(own) for own in controls[0]] == [vars(own) for own in controls[1]]


@pytest.mark.parametrize("key", [*KEYS, *FILTERED])
def test_what_is_built(key, roomy_path, shared):
    settings = {"prompts": {"query": "Query: "}, "texts": FIT, "language": None}
    before, after = old_build(roomy_path, key, **settings), new_build(roomy_path, key, **settings)
    texts = [*TEXTS[:4], "", "To be, or not to be?"]
    assert relative_error(after.encode(texts), before.encode(texts)) < 1e-5
    assert relative_error(after.encode_query(texts), before.encode_query(texts)) < 1e-5
    assert [type(part).__name__ for part in before] == [type(part).__name__ for part in after]
