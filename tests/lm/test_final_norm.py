"""final_norm=False: every module on the states as the last layer leaves them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoModel

from st_reba import CausalTransformer, LayerStates, MetaEOLModule, RefinedThoughtModule
from st_reba.reading.layers import LayerReader

from .. import oracles
from ..backbones import FEW, TEXTS, own
from ..catalogued import completed
from ..conftest import pipeline, relative_error

CASES = completed(
    {"layer states": (LayerStates, {}), "metaeol": (MetaEOLModule, {"templates": ["prompteol", "{text}"]})}
)


@pytest.fixture(scope="module")
def normless(backbone_path):
    """A loaded backbone whose final norm does nothing: the oracle, on which every module is what it was."""
    backbone = CausalTransformer(backbone_path())
    backbone.model.norm = nn.Identity()
    return backbone


@pytest.mark.parametrize("case", CASES)
def test_every_module(case, normless, shared):
    module_class, settings = CASES[case]
    settings = {"output_layer": -1, **settings}
    expected = pipeline(module_class(normless, **{**settings, "final_norm": True})).encode(TEXTS[:3])
    model = pipeline(module_class(shared(), **{**settings, "final_norm": False}))
    assert relative_error(model.encode(TEXTS[:3], batch_size=2), expected) < 1e-5


@pytest.mark.parametrize("architecture", FEW)
@pytest.mark.parametrize("layer", [3, 1])
def test_every_architecture(architecture, layer, shared, eager, token_ids):
    """transformers' own hidden states; of the last layer, which come normed, what a hook sees."""
    module = CausalTransformer(shared(architecture), output_layer=layer, final_norm=False)
    words = pipeline(module).encode(TEXTS, output_value="token_embeddings")
    for text, value in zip(TEXTS, words, strict=True):
        expected = oracles.after_each_layer(eager(architecture), architecture, token_ids(text), normed=False)[layer]
        assert relative_error(value, expected) < 1e-5


def test_it_is_saved(backbone_path, tmp_path):
    model = pipeline(CausalTransformer(backbone_path(), final_norm=False))
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert loaded[0].final_norm is False
    assert np.array_equal(loaded.encode(TEXTS), model.encode(TEXTS))
    # The norm is still there, for whoever wants it.
    again = AutoModel.from_pretrained(str(own(tmp_path)))
    assert torch.equal(again.norm.weight, model[0].model.norm.weight)


def test_gradients_and_those_who_share_a_backbone_keep_their_norm(backbone_path):
    normed = pipeline(CausalTransformer(backbone_path()))
    before = normed.encode(TEXTS)
    raw = pipeline(CausalTransformer(normed[0], final_norm=False)).train()
    raw(raw.preprocess(TEXTS))["sentence_embedding"].sum().backward()
    assert raw[0].model.layers[-1].mlp.down_proj.weight.grad.norm() > 0
    assert raw[0].model.norm.weight.grad is None
    assert np.array_equal(normed.eval().encode(TEXTS), before)


def test_every_layer_is_read_alike(shared):
    embeddings = LayerReader(pipeline(CausalTransformer(shared(), final_norm=False))).embeddings(TEXTS)
    for layer in (1, 2, 3):
        short = CausalTransformer(shared(), output_layer=layer, final_norm=False)
        assert relative_error(embeddings[layer], pipeline(short).encode(TEXTS)) < 1e-5


@pytest.mark.parametrize("value", ["no", 0])
@pytest.mark.parametrize("module_class", [CausalTransformer, LayerStates, MetaEOLModule, RefinedThoughtModule])
def test_wrong_values(module_class, value, shared):
    with pytest.raises(ValueError, match=f"final_norm={value!r}: use True or False"):
        module_class(shared(), final_norm=value)
