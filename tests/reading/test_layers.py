"""Embeddings after each layer: the states there, behind the final norm, as the module would read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers.base.modules import Transformer
from transformers import AutoModel

from st_reba import BidirectionalLastLayer, CausalTransformer, EchoModule, KVReroutingModule, ReBAModule
from st_reba.evaluation.layers import LayerReader

from .. import backbones, oracles
from ..backbones import TEXTS
from ..conftest import forward_passes, pipeline, relative_error


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "falcon"])
def test_every_layer_on_every_architecture(name, shared, eager, token_ids):
    """In one pass."""
    model = pipeline(CausalTransformer(shared(name)))
    reader = LayerReader(model)
    with forward_passes() as passes:
        embeddings = reader.embeddings(TEXTS)
    assert (reader.count, len(passes)) == (4, 1)
    for index, text in enumerate(TEXTS):
        layers = oracles.after_each_layer(eager(name), name, token_ids(text))
        assert relative_error(embeddings[:, index], torch.stack([states.mean(0) for states in layers])) < 1e-5
    assert relative_error(embeddings[-1], model.encode(TEXTS)) < 1e-5


@pytest.mark.parametrize(
    ("settings", "norm"),
    [
        ({"word_embed_proj_dim": 16}, lambda model, states: model.project_out(model.final_layer_norm(states))),
        ({"do_layer_norm_before": False}, lambda model, states: states),
    ],
)
def test_what_stands_behind_the_last_layer(settings, norm, tmp_path, token_ids):
    """A norm and a projection (two steps), or nothing at all: OPT has them all."""
    torch.manual_seed(0)
    config = backbones.config("opt")
    config.update(settings)
    backbone = backbones.randomize(AutoModel.from_config(config).eval())
    model = pipeline(CausalTransformer(backbones.save(backbone, tmp_path)), "lasttoken")
    embeddings = LayerReader(model).embeddings(TEXTS[:1])
    with torch.inference_mode():
        states = oracles.layer_states(backbone, token_ids(TEXTS[0]))
        expected = norm(backbone.decoder, states[:, None])
    assert relative_error(embeddings[1:], expected) < 1e-5


@pytest.mark.parametrize("kind", [EchoModule, BidirectionalLastLayer, KVReroutingModule])
def test_the_last_features_are_the_modules_own(kind, shared, monkeypatch):
    """And batches do not matter."""
    model = pipeline(kind(shared()))
    before = model.encode(TEXTS)
    reader = LayerReader(model)
    *earlier, last = reader.features(TEXTS)
    with torch.inference_mode():
        expected = model[0](model.preprocess(TEXTS))
    assert len(earlier) == 3
    assert last.keys() == expected.keys()
    assert all(torch.equal(last[name], value) for name, value in expected.items())
    alone = torch.cat([reader.embeddings([text]) for text in [*TEXTS, ""]], dim=1)
    # A module may run a batch in parts: each layer's states must find their own.
    monkeypatch.setattr(kind, "TOKENS_PER_THREAD", 1)
    assert relative_error(reader.embeddings([*TEXTS, ""]), alone) < 1e-5
    monkeypatch.undo()
    assert np.array_equal(model.encode(TEXTS), before), "no hook is left"


def test_what_cannot_be_read(shared, backbone_path, monkeypatch):
    with pytest.raises(ValueError, match=r"ReBAModule, whose embedding depends on .* Use a model with Causal"):
        LayerReader(pipeline(ReBAModule(shared())))
    backbone = Transformer(backbone_path())
    kind, forward = type(backbone.model), type(backbone.model).forward

    def scaled(self, **kwargs):
        output = forward(self, **kwargs)
        output.last_hidden_state = 2 * output.last_hidden_state
        return output

    monkeypatch.setattr(kind, "forward", scaled)
    with pytest.raises(ValueError, match="LlamaModel changes its last layer's states in a way that could not be f"):
        LayerReader(pipeline(CausalTransformer(backbone)))
