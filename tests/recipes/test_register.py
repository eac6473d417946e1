"""Modules of other people's: they load, and stand in comparisons, by their own import."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from torch import nn

import st_reba
from st_reba import CausalTransformer, Row
from st_reba.compare import Recipes
from st_reba.recipes import asked_for, default_recipes, every_row, find, lookup

from ..backbones import TEXTS
from ..conftest import pipeline

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
    made = Recipes(CausalTransformer(backbone_path()), asked_for(["their-module", "classical"], 3, TEXTS))
    assert np.allclose(*(made.matrix(f"{name}, mean", TEXTS) for name in ("TheirModule", "Classical")), atol=1e-5)


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


@pytest.mark.parametrize(
    ("name", "key"), [("DoubleEOL", "double-eol"), ("KVMean2", "kv-mean2"), ("Layer_Mean", "layer-mean")]
)
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
