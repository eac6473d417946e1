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

from ..backbones import TELLING, TEXTS, own
from ..conftest import paired, pipeline, relative_error
from ..modules.methods import EACH_MODULE, RECIPES
from ..reading.test_layers import final_norm


@pytest.fixture(scope="module")
def normless(backbone_path):
    """A loaded backbone whose final norm does nothing: the oracle, on which every module is what it was."""
    backbone = CausalTransformer(backbone_path())
    backbone.model.norm = nn.Identity()
    return backbone


@pytest.mark.parametrize("recipe", EACH_MODULE)
def test_every_module(recipe, normless, shared):
    module_class, settings = RECIPES[recipe]
    settings = {"output_layer": -1, **settings}
    expected = pipeline(module_class(normless, **{**settings, "final_norm": True})).encode(TEXTS[:3])
    model = pipeline(module_class(shared(), **{**settings, "final_norm": False}))
    assert relative_error(model.encode(TEXTS[:3], batch_size=2), expected) < 1e-5


@pytest.mark.parametrize(("architecture", "layer"), paired(TELLING, [3, 1]))
def test_every_architecture(architecture, layer, shared, eager, token_ids):
    """transformers' own hidden states; of the last layer, which come normed, what a hook sees."""
    module = CausalTransformer(shared(architecture), output_layer=layer, final_norm=False)
    words = pipeline(module).encode(TEXTS, output_value="token_embeddings")
    seen = []
    hook = final_norm(architecture, eager(architecture)).register_forward_pre_hook(lambda norm, args: seen.append(args))
    with torch.inference_mode():
        for text, value in zip(TEXTS, words, strict=True):
            ids = torch.tensor([token_ids(text)])
            states = eager(architecture)(input_ids=ids, output_hidden_states=True).hidden_states[layer]
            expected = seen[-1][0] if layer == 3 else states
            assert relative_error(value, expected[0]) < 1e-5
    hook.remove()


def test_it_is_saved(backbone_path, tmp_path):
    model = pipeline(CausalTransformer(backbone_path(), final_norm=False))
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert loaded[0].final_norm is False
    assert np.array_equal(loaded.encode(TEXTS), model.encode(TEXTS))
    # The norm is still there, for whoever wants it.
    again = AutoModel.from_pretrained(str(own(tmp_path)))
    assert torch.equal(again.norm.weight, model[0].model.norm.weight)


def test_those_who_share_a_backbone_keep_their_norm(backbone_path):
    normed = pipeline(CausalTransformer(backbone_path()))
    before = normed.encode(TEXTS)
    raw = pipeline(CausalTransformer(normed[0], final_norm=False)).encode(TEXTS)
    assert relative_error(raw, before) > 0.01
    assert np.array_equal(normed.encode(TEXTS), before)


def test_gradients(backbone_path):
    model = pipeline(CausalTransformer(backbone_path(), final_norm=False)).train()
    model(model.preprocess(TEXTS))["sentence_embedding"].sum().backward()
    assert model[0].model.layers[-1].mlp.down_proj.weight.grad.norm() > 0
    assert model[0].model.norm.weight.grad is None


def test_every_layer_is_read_alike(backbone_path):
    model = pipeline(CausalTransformer(backbone_path(), final_norm=False))
    embeddings = LayerReader(model).embeddings(TEXTS)
    for layer in (1, 2, 3):
        short = CausalTransformer(backbone_path(), output_layer=layer, final_norm=False)
        assert relative_error(embeddings[layer], pipeline(short).encode(TEXTS)) < 1e-5


@pytest.mark.parametrize("value", ["no", 0])
@pytest.mark.parametrize("module_class", [CausalTransformer, LayerStates, MetaEOLModule, RefinedThoughtModule])
def test_wrong_values(module_class, value, shared):
    with pytest.raises(ValueError, match=f"final_norm={value!r}: use True or False"):
        module_class(shared(), final_norm=value)
